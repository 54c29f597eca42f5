"""The numbers of a run on disk: written while it goes on, read at any time, without torch."""
