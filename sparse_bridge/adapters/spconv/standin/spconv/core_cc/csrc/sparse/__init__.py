"""Kernel maps and products."""

from spconv.core_cc.csrc.sparse import all, alloc, convops, inference

__all__ = ["all", "alloc", "convops", "inference"]
