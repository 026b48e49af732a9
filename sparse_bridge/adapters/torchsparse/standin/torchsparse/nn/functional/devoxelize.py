"""Voxels to points."""

from sparse_bridge.adapters.torchsparse.upstream.points import calc_ti_weights, spdevoxelize

__all__ = ["calc_ti_weights", "spdevoxelize"]
