"""Parameters and buffers as sites: their values, and what stands in for them during a run."""
