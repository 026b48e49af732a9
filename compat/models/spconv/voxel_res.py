"""CenterPoint's backbone as in OpenPCDet: VoxelResBackBone8x, residual and with biases."""

from __future__ import annotations

from typing import Any

from torch import nn

from .blocks import SparseBasicBlock
from .pcdet_utils import BatchNorm, Detector3D, HeightCompression, MeanVFE, post_act_block, spconv
from .second import VoxelBackBone8x, batch, outputs

__all__ = ["batch", "build", "outputs", "residual_stage"]


def residual_stage(c_in: int, c_out: int, number: int, padding: Any, bias: bool = True, kernel_size: int = 3) -> Any:
    """A strided layer and two residual blocks."""
    return spconv.SparseSequential(
        post_act_block(
            c_in, c_out, kernel_size, stride=2, padding=padding, indice_key=f"spconv{number}", conv_type="spconv"
        ),
        SparseBasicBlock(c_out, f"res{number}", bias),
        SparseBasicBlock(c_out, f"res{number}", bias),
    )


class VoxelResBackBone8x(VoxelBackBone8x):
    """As VoxelBackBone8x, with residual blocks and 128 channels at the end."""

    def __init__(self, input_channels: int, grid_size: Any, bias: bool = True):
        super().__init__(input_channels, grid_size)
        self.conv1 = spconv.SparseSequential(SparseBasicBlock(16, "res1", bias), SparseBasicBlock(16, "res1", bias))
        self.conv2 = residual_stage(16, 32, 2, 1, bias)
        self.conv3 = residual_stage(32, 64, 3, 1, bias)
        self.conv4 = residual_stage(64, 128, 4, (0, 1, 1), bias)
        self.conv_out = spconv.SparseSequential(
            spconv.SparseConv3d(
                128, 128, (3, 1, 1), stride=(2, 1, 1), padding=0, bias=False, indice_key="spconv_down2"
            ),
            BatchNorm(128),
            nn.ReLU(),
        )


def build(input_channels: int = 5, grid_size: Any = (1504, 1504, 40), bias: bool = True) -> nn.Module:
    return Detector3D(
        vfe=MeanVFE(),
        backbone_3d=VoxelResBackBone8x(input_channels, grid_size, bias),
        map_to_bev_module=HeightCompression(),
    )
