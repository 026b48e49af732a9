"""Voxelisation of point clouds."""

import torch
from cumm import tensorview as tv
from spconv.core_cc.csrc.sparse.all import SpconvOps
from spconv.pytorch.cppcore import get_current_stream, torch_tensor_to_tv

from sparse_bridge.adapters.spconv.upstream.voxelizer import PointToVoxel, gather_features_by_pc_voxel_id

__all__ = [
    "PointToVoxel",
    "SpconvOps",
    "gather_features_by_pc_voxel_id",
    "get_current_stream",
    "torch",
    "torch_tensor_to_tv",
    "tv",
]
