"""Measures gaff beside raw hooks and peers: ``python -m benchmarks``. Prints the tables of docs/benchmarks.md."""
