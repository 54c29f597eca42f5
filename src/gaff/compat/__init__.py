"""What is private to torch and other libraries, or differs between their versions: each fact stands here once."""
