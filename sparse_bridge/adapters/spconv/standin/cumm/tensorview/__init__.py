"""Tensors of the voxelizers and the activation enum, under cumm's names."""

from sparse_bridge.adapters.spconv.tensorview import *  # noqa: F403
