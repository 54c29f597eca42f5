"""Sinks look: they receive the events of sites and keep something of them. They know nothing of hooks."""
