"""Sonata and Concerto: Point Transformer V3 without a decoder, on layer norms; the features of all
levels are carried up and concatenated, and a linear probe reads them.

Source: the papers (arXiv 2503.16429, 2510.23607), on the layers of `ptv3`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .point_sequential import Point, PointModule, PointSequential
from .ptv3 import Block, GridPooling, batch, encoder

__all__ = ["batch", "build"]


class Embedding(PointModule):
    """A linear stem; masked points get a learned token in its place."""

    def __init__(self, in_channels: int, embed_channels: int):
        super().__init__()
        self.stem = PointSequential(
            linear=nn.Linear(in_channels, embed_channels), norm=nn.LayerNorm(embed_channels), act=nn.GELU()
        )
        self.mask_token = nn.Parameter(torch.zeros(1, embed_channels))

    def forward(self, point: Point) -> Point:
        point = self.stem(point)
        if "mask" in point:
            token = self.mask_token.to(point.feat.dtype)
            point.feat = torch.where(point.mask[:, None], token, point.feat)
            point.sparse_conv_feat = point.sparse_conv_feat.replace_feature(point.feat)
        return point


class LayerNormPooling(GridPooling):
    """`GridPooling` with a layer norm: statistics of a batch leak between views."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels)
        self.norm = PointSequential(nn.LayerNorm(out_channels))


class PointTransformerV3(PointModule):
    """Five encoder stages."""

    def __init__(
        self,
        in_channels: int,
        enc_depths: Any,
        enc_channels: Any,
        enc_num_head: Any,
        patch_size: int,
        mask_ratio: float,
    ):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.embedding = Embedding(in_channels, enc_channels[0])
        self.enc = encoder(
            enc_depths,
            lambda s, _: Block(enc_channels[s], enc_num_head[s], patch_size, f"stage{s}"),
            lambda s: LayerNormPooling(enc_channels[s - 1], enc_channels[s]),
        )

    def forward(self, data_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        point = Point(data_dict)
        point.sparsify()
        if self.training:  # every n-th point, so that both sides of a comparison mask the same ones
            every = max(1, round(1 / self.mask_ratio))
            rows = torch.arange(len(point.feat), device=point.feat.device)
            point["mask"] = rows % every == 0
        point = self.enc(self.embedding(point))
        while "pooling_parent" in point:  # up to the finest level, concatenating
            parent, inverse = point.pop("pooling_parent"), point.pop("pooling_inverse")
            parent.feat = torch.cat([parent.feat, point.feat[inverse]], dim=1)
            point = parent
        return point.feat


class Probe(nn.Module):
    """The backbone and a linear layer."""

    def __init__(self, backbone: nn.Module, channels: int, num_classes: int):
        super().__init__()
        self.backbone = backbone
        self.seg_head = nn.Linear(channels, num_classes)

    def forward(self, data_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.seg_head(self.backbone(data_dict))


def build(
    in_channels: int = 6,
    num_classes: int = 20,
    enc_depths: Any = (3, 3, 3, 12, 3),
    enc_channels: Any = (48, 96, 192, 384, 512),
    enc_num_head: Any = (3, 6, 12, 24, 32),
    patch_size: int = 1024,
    mask_ratio: float = 0.3,
) -> nn.Module:
    backbone = PointTransformerV3(in_channels, enc_depths, enc_channels, enc_num_head, patch_size, mask_ratio)
    return Probe(backbone, sum(enc_channels), num_classes)
