"""Counting."""

from sparse_bridge.adapters.torchsparse.points import spcount

__all__ = ["spcount"]
