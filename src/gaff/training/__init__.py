"""Many steps: watching, judging, clipping, guarding, and the numbers of a tensor that they rest on."""
