"""Watching a training run: what happens, what of it is looked at and when, and who is told."""
