"""A data set's activations and gradients, on disk: shards of ordinary safetensors files, written once each.

``run`` goes through the data and writes; ``store`` reads. Between them lie files only: see docs/harvest.md.
"""
