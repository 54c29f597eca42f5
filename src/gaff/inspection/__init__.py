"""One run, looked at: traces, sites, the anatomy of a backward pass, where runs differ, where a NaN began."""
