"""Pages: one file that works offline. Needs numpy (``gaff[page]``); no torch."""
