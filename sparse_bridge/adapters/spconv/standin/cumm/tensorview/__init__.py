"""Tensors of the voxelizers and the activation enum, under cumm's names."""

from cumm.tensorview import gemm as gemm

from sparse_bridge.adapters.spconv.upstream.tensorview import *  # noqa: F403

Activation = gemm.Activation
