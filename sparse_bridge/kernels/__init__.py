"""Triton kernels and their launchers: they see tensors and tile shapes, never frameworks or
settings.

Only `target` may be imported without Triton; every other module here imports it at the top.
"""
