"""Kernel maps from coordinates, at their path in 2.0."""

from torchsparse.nn.functional.conv.kmap.build_kmap import build_kernel_map

__all__ = ["build_kernel_map"]
