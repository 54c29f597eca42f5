"""Numbers that stand for a tensor: one pass over memory, the same numbers compiled and in plain torch."""
