"""Voxelizers and box operations.

`VoxelGenerator` (spconv 1.x) is absent on purpose: projects probe for it first.
"""

from contextlib import AbstractContextManager

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
from sparse_bridge.adapters.spconv.upstream.voxelizer import (
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
    "Point2VoxelCPU1d", "Point2VoxelCPU2d", "Point2VoxelCPU3d", "Point2VoxelCPU4d",
    "Point2VoxelGPU1d", "Point2VoxelGPU2d", "Point2VoxelGPU3d", "Point2VoxelGPU4d",
    "non_max_suppression_cpu", "np", "nullcontext", "rbbox_intersection", "rbbox_iou",
    "rbbox_iou_loss", "rotate_non_max_suppression_cpu", "tv",
]  # fmt: skip


class nullcontext(AbstractContextManager):
    """A context that does nothing."""

    def __init__(self, enter_result=None):
        self.enter_result = enter_result

    def __enter__(self):
        return self.enter_result

    def __exit__(self, *exc):
        return None
