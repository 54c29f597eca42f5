"""What is opened and left: captures, edits, extractors; what was asked of them and what they did."""
