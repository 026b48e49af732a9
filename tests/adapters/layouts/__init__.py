"""Tensors that users hand over: in every memory layout, and arrays in their place."""
