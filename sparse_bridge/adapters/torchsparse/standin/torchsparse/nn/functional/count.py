"""Counting."""

from sparse_bridge.adapters.torchsparse.upstream.points import spcount

__all__ = ["spcount"]
