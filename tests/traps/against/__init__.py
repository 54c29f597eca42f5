"""What every tool of this kind should get right, asked of gaff, of hooks written by hand, and of other libraries."""
