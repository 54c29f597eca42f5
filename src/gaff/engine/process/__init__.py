"""Seen for the whole process: optimizer steps, outermost calls, the models that a script trains."""
