"""Offsets with lists of alike length, multiplied in one call: the per-offset dataflow's batches."""
