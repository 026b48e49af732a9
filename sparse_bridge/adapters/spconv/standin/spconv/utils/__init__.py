"""Voxelizers and box operations.

`VoxelGenerator` (spconv 1.x) is absent on purpose: projects probe for it first.
"""

from contextlib import nullcontext

import numpy as np
from cumm import tensorview as tv
from spconv.core_cc.csrc.utils.boxops import BoxOps as BoxOps
from spconv.cppconstants import CPU_ONLY_BUILD as CPU_ONLY_BUILD

from sparse_bridge.adapters.spconv.upstream.boxes import (
    non_max_suppression_cpu,
    rbbox_intersection,
    rbbox_iou,
    rbbox_iou_loss,
    rotate_non_max_suppression_cpu,
)
from sparse_bridge.adapters.spconv.upstream.point2voxel import (
    Point2VoxelCPU1d,
    Point2VoxelCPU2d,
    Point2VoxelCPU3d,
    Point2VoxelCPU4d,
    Point2VoxelGPU1d,
    Point2VoxelGPU2d,
    Point2VoxelGPU3d,
    Point2VoxelGPU4d,
)

__all__ = [
    "Point2VoxelCPU1d",
    "Point2VoxelCPU2d",
    "Point2VoxelCPU3d",
    "Point2VoxelCPU4d",
    "Point2VoxelGPU1d",
    "Point2VoxelGPU2d",
    "Point2VoxelGPU3d",
    "Point2VoxelGPU4d",
    "non_max_suppression_cpu",
    "np",
    "nullcontext",
    "rbbox_intersection",
    "rbbox_iou",
    "rbbox_iou_loss",
    "rotate_non_max_suppression_cpu",
    "tv",
]
