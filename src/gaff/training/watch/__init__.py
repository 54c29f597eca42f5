"""A training run, watched from outside: from torch's hooks to a sampled step, from there to the record."""
