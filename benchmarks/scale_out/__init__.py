"""Training on one GPU and on several of one host: `python -m benchmarks.scale_out`."""
