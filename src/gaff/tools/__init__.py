"""What is built on the core, one tool a file: take, trace, sites, clip_gradients, sample_norms."""
