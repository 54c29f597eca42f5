"""Where two runs, or two models, first part. Needs no torch."""
