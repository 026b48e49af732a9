"""Programs of random layers, and what stands beside layers, made of a seed: for `test_random_programs`."""
