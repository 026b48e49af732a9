"""SparseUNet of mmdetection3d (Part-A2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import columns, merge_lateral
from .mmdet3d_encoder import LAYOUTS, SparseEncoder, batch
from .mmdet3d_ops import MODELS, SparseBasicBlock, make_sparse_convmodule

__all__ = ["SparseUNet", "batch", "build", "outputs"]

DECODER_CHANNELS = ((64, 64, 64), (64, 64, 32), (32, 32, 16), (16, 16, 16))
DECODER_PADDINGS = ((1, 0), (1, 0), (0, 0), (0, 1))


class SparseUNet(SparseEncoder):
    """The encoder of conv modules, and a decoder of lateral, merge and upsample layers."""

    def __init__(
        self,
        in_channels: int,
        sparse_shape: Any,
        encoder_channels: Any = None,
        encoder_paddings: Any = None,
        decoder_channels: Any = DECODER_CHANNELS,
        decoder_paddings: Any = DECODER_PADDINGS,
        **options: Any,
    ):
        super().__init__(in_channels, sparse_shape, "conv_module", encoder_channels, encoder_paddings, **options)
        self.stage_num = len(self.encoder_channels)
        width = self.encoder_channels[-1][-1]
        for i, (transform, merge, up) in enumerate(decoder_channels):
            level = self.stage_num - i
            subm = f"subm{level}"
            lateral = SparseBasicBlock(width, transform, conv_cfg={"type": "SubMConv3d", "indice_key": subm})
            self.add_module(f"lateral_layer{level}", lateral)
            merged = make_sparse_convmodule(2 * width, merge, 3, padding=decoder_paddings[i][0], indice_key=subm)
            self.add_module(f"merge_layer{level}", merged)
            key, kind = f"spconv{level}", "SparseInverseConv3d"
            if level == 1:
                key, kind = subm, "SubMConv3d"
            upsample = make_sparse_convmodule(
                width, up, 3, padding=decoder_paddings[i][1], indice_key=key, conv_type=kind
            )
            self.add_module(f"upsample_layer{level}", upsample)
            width = up

    def decode(self, stages: list[Any]) -> Any:
        """Back to the sites of the first stage."""
        x = stages[-1]
        for level in range(self.stage_num, 0, -1):
            x = merge_lateral(
                x,
                stages[level - 1],
                getattr(self, f"lateral_layer{level}"),
                getattr(self, f"merge_layer{level}"),
                getattr(self, f"upsample_layer{level}"),
            )
        return x

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        features = self.encode(voxel_features, coors, batch_size)
        spatial = self.to_bev(self.conv_out(features[-1]).dense())
        seg = self.decode(features[1:])
        return {"spatial_features": spatial, "seg_features": seg.features}


MODELS._register_module(SparseUNet, force=True)


def build(in_channels: int = 4, sparse_shape: Any = (41, 1600, 1408)) -> nn.Module:
    channels, paddings = LAYOUTS["conv_module"]
    return MODELS.build(
        {
            "type": "SparseUNet",
            "in_channels": in_channels,
            "sparse_shape": list(sparse_shape),
            "encoder_channels": channels,
            "encoder_paddings": paddings,
        }
    )


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    return [result["seg_features"], columns(result["spatial_features"])]
