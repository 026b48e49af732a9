"""Pools over whole batch items."""

from sparse_bridge.adapters.torchsparse.operations.pool import global_pool_forward

__all__ = ["global_avg_pool", "global_max_pool"]


def global_avg_pool(inputs):
    """Means [B, C]."""
    return global_pool_forward(inputs, "avg")


def global_max_pool(inputs):
    """Maxima [B, C]."""
    return global_pool_forward(inputs, "max")
