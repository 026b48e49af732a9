"""Kinds of kernels."""
