"""All numbers of a tensor in one pass over its memory: compiled, or in plain torch."""
