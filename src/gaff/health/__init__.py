"""What is wrong with a run, and where it began."""
