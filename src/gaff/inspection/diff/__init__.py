"""Where two runs, or two traces, first part."""
