"""SparseEncoder of mmdetection3d, both block types, built from its registry."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import by_site, columns, zyx
from .mmdet3d_ops import MODELS, SparseBasicBlock, SparseConvTensor, SparseSequential, make_sparse_convmodule

# encoder_channels, encoder_paddings
LAYOUTS = {
    "conv_module": (((16,), (32, 32, 32), (64, 64, 64), (64, 64, 64)), ((1,), (1, 1, 1), (1, 1, 1), ((0, 1, 1), 1, 1))),
    "basicblock": (
        ((16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128)),
        ((0, 0, 1), (0, 0, 1), (0, 0, (0, 1, 1)), (0, 0)),
    ),
}


class SparseEncoder(nn.Module):
    """Encoder of SECOND-like detectors: dense bird's-eye view [B, C * Z, Y, X] of stride 8."""

    def __init__(
        self,
        in_channels: int,
        sparse_shape: Any,
        block_type: str = "conv_module",
        encoder_channels: Any = None,
        encoder_paddings: Any = None,
        base_channels: int = 16,
        output_channels: int = 128,
        last_kernel: Any = (3, 1, 1),
        last_stride: Any = (2, 1, 1),
        return_middle_feats: bool = False,
    ):
        super().__init__()
        assert block_type in LAYOUTS
        self.sparse_shape, self.return_middle_feats = sparse_shape, return_middle_feats
        channels, paddings = LAYOUTS[block_type]
        self.encoder_channels = encoder_channels or channels
        self.encoder_paddings = encoder_paddings or paddings
        self.conv_input = make_sparse_convmodule(in_channels, base_channels, 3, padding=1, indice_key="subm1")
        width = self.make_encoder_layers(base_channels, block_type)
        self.conv_out = make_sparse_convmodule(
            width,
            output_channels,
            last_kernel,
            stride=last_stride,
            padding=0,
            indice_key="spconv_down2",
            conv_type="SparseConv3d",
        )

    def make_encoder_layers(self, in_channels: int, block_type: str) -> int:
        """Add the stages; the width of the last."""
        self.encoder_layers = SparseSequential()
        last = len(self.encoder_channels) - 1
        for i, widths in enumerate(self.encoder_channels):
            blocks = []
            for j, width in enumerate(widths):
                padding = tuple(self.encoder_paddings[i])[j]
                first_of_stage = block_type == "conv_module" and i != 0 and j == 0
                end_of_stage = block_type == "basicblock" and i != last and j == len(widths) - 1
                if first_of_stage or end_of_stage:
                    blocks.append(
                        make_sparse_convmodule(
                            in_channels,
                            width,
                            3,
                            stride=2,
                            padding=padding,
                            indice_key=f"spconv{i + 1}",
                            conv_type="SparseConv3d",
                        )
                    )
                elif block_type == "basicblock":
                    blocks.append(SparseBasicBlock(width, width))
                else:
                    blocks.append(
                        make_sparse_convmodule(in_channels, width, 3, padding=padding, indice_key=f"subm{i + 1}")
                    )
                in_channels = width
            self.encoder_layers.add_module(f"encoder_layer{i + 1}", SparseSequential(*blocks))
        return in_channels

    def encode(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> list:
        """Sparse tensors: after the stem and after each stage."""
        x = SparseConvTensor(voxel_features, coors.int(), self.sparse_shape, batch_size)
        features = [self.conv_input(x)]
        for layer in self.encoder_layers:
            features.append(layer(features[-1]))
        return features

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        with torch.autocast(voxel_features.device.type, enabled=False):
            features = self.encode(voxel_features, coors, batch_size)
            dense = self.conv_out(features[-1]).dense()
            spatial = self.to_bev(dense)
        return (spatial, features[1:]) if self.return_middle_feats else spatial

    def to_bev(self, dense: torch.Tensor) -> torch.Tensor:
        n, c, d, h, w = dense.shape
        return dense.view(n, c * d, h, w)


MODELS._register_module(SparseEncoder, force=True)


def build(in_channels: int = 4, sparse_shape: Any = (41, 1600, 1408), block_type: str = "conv_module") -> nn.Module:
    return MODELS.build(
        {
            "type": "SparseEncoder",
            "in_channels": in_channels,
            "block_type": block_type,
            "sparse_shape": list(sparse_shape),
            "return_middle_feats": True,
        }
    )


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), zyx(scene, device), scene.batch_size


def outputs(result: Any) -> list[torch.Tensor]:
    spatial, middle = result
    return [columns(spatial), *(by_site(x) for x in middle)]
