"""MinkUNet of mmdetection3d on its spconv backend, with the linear segmentation head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import replace_feature, xyz
from .mmdet3d_ops import MODELS, SparseBasicBlock, SparseConvTensor, SparseSequential, make_sparse_convmodule


class MinkUNetBackbone(nn.Module):
    """U-Net of kernels 2 between strides, residual blocks at each."""

    def __init__(
        self,
        in_channels: int,
        base_channels: int = 32,
        encoder_channels: Any = (32, 64, 128, 256),
        encoder_blocks: Any = (2, 2, 2, 2),
        decoder_channels: Any = (256, 128, 96, 96),
        decoder_blocks: Any = (2, 2, 2, 2),
    ):
        super().__init__()
        self.num_stages = len(encoder_channels)
        self.conv_input = nn.Sequential(
            make_sparse_convmodule(in_channels, base_channels, 3, padding=1, indice_key="subm0"),
            make_sparse_convmodule(base_channels, base_channels, 3, padding=1, indice_key="subm0"),
        )
        widths = [base_channels, *encoder_channels]
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for i in range(self.num_stages):
            down = make_sparse_convmodule(
                widths[i], widths[i], 2, stride=2, indice_key=f"spconv{i + 1}", conv_type="SparseConv3d"
            )
            stage = self._blocks(widths[i], widths[i + 1], encoder_blocks[i], f"subm{i + 1}")
            self.encoder.append(nn.Sequential(down, *stage))
        width = widths[-1]
        for i, out in enumerate(decoder_channels):
            up = make_sparse_convmodule(
                width, out, 2, indice_key=f"spconv{self.num_stages - i}", conv_type="SparseInverseConv3d"
            )
            lateral = widths[-2 - i]
            key = f"subm{self.num_stages - 1 - i}"
            stage = self._blocks(out + lateral, out, decoder_blocks[i], key)
            self.decoder.append(nn.ModuleList([up, SparseSequential(*stage)]))
            width = out

    @staticmethod
    def _blocks(c_in: int, c_out: int, count: int, key: str) -> list[nn.Module]:
        made = []
        for j in range(count):
            width = c_in if j == 0 else c_out
            project = None
            if width != c_out:
                project = make_sparse_convmodule(width, c_out, 1, order=("conv", "norm"))
            cfg = {"type": "SubMConv3d", "indice_key": key}
            made.append(SparseBasicBlock(width, c_out, project, cfg))
        return made

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor) -> torch.Tensor:
        spatial_shape = coors.max(0)[0][1:] + 1
        batch_size = int(coors[-1, 0]) + 1
        x = SparseConvTensor(voxel_features, coors, spatial_shape, batch_size)
        laterals = [self.conv_input(x)]
        for stage in self.encoder:
            laterals.append(stage(laterals[-1]))
        x = laterals.pop()
        for up, blocks in self.decoder:
            x = up(x)
            x = replace_feature(x, torch.cat((x.features, laterals.pop().features), dim=1))
            x = blocks(x)
        return x.features


class MinkUNet(nn.Module):
    """Backbone and linear classifier."""

    def __init__(self, in_channels: int, num_classes: int):
        super().__init__()
        self.backbone = MODELS.build({"type": "MinkUNetBackbone", "in_channels": in_channels})
        self.decode_head = nn.ModuleDict({"conv_seg": nn.Linear(96, num_classes)})

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor) -> torch.Tensor:
        return self.decode_head["conv_seg"](self.backbone(voxel_features, coors))


MODELS._register_module(MinkUNetBackbone, force=True)


def build(in_channels: int = 4, num_classes: int = 20) -> nn.Module:
    return MinkUNet(in_channels, num_classes)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), xyz(scene, device)
