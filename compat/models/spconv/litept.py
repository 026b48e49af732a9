"""LitePT: convolutions where points are many, attention with rotary positions where they are few.

Source: the paper (arXiv 2512.13689), on the layers of `ptv3`.
"""

from __future__ import annotations

from typing import Any

import spconv.pytorch as spconv
import torch
from torch import nn

from .point_sequential import Point, PointModule, PointSequential
from .ptv3 import Block, Embedding, GridPooling, GridUnpooling, SerializedAttention, batch, encoder

__all__ = ["batch", "build"]


def rotated(x: torch.Tensor, coords: torch.Tensor, base: float = 100.0) -> torch.Tensor:
    """Rotary embedding of heads [..., n, d] by coordinates [..., n, 3]: a third of d per axis."""
    width = x.shape[-1] // 6 * 2
    parts = []
    for axis, part in enumerate(x[..., : 3 * width].split(width, dim=-1)):
        steps = torch.arange(width // 2, device=x.device, dtype=x.dtype)
        angle = coords[..., axis, None].to(x.dtype) * base ** (-2 * steps / max(width, 1))
        first, second = part.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        parts += [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*parts, x[..., 3 * width :]], dim=-1)


class RotaryAttention(SerializedAttention):
    """Attention inside patches; queries and keys are turned by the points' cells."""

    def prepared(self, heads: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return rotated(heads, coords)


class ConvBlock(PointModule):
    """A submanifold convolution, a linear layer and a norm, around a shortcut."""

    def __init__(self, channels: int, indice_key: str):
        super().__init__()
        self.conv = PointSequential(
            spconv.SubMConv3d(channels, channels, kernel_size=3, bias=True, indice_key=indice_key),
            nn.Linear(channels, channels),
            nn.LayerNorm(channels),
            nn.GELU(),
        )

    def forward(self, point: Point) -> Point:
        shortcut = point.feat
        point = self.conv(point)
        point.feat = shortcut + point.feat
        point.sparse_conv_feat = point.sparse_conv_feat.replace_feature(point.feat)
        return point


class AttentionBlock(Block):
    """Attention and MLP, without a convolution; pre-norm."""

    attention = RotaryAttention


class LitePT(PointModule):
    """Encoder stages of convolutions, then of attention; a decoder of projections only."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        enc_depths: Any,
        enc_channels: Any,
        enc_num_head: Any,
        dec_channels: Any,
        conv_stages: int,
        patch_size: int,
    ):
        super().__init__()
        self.embedding = Embedding(in_channels, enc_channels[0])

        def block(s: int, _: int) -> nn.Module:
            if s < conv_stages:
                return ConvBlock(enc_channels[s], f"stage{s}")
            return AttentionBlock(enc_channels[s], enc_num_head[s], patch_size)

        self.enc = encoder(enc_depths, block, lambda s: GridPooling(enc_channels[s - 1], enc_channels[s]))
        self.dec = PointSequential()
        widths = [*dec_channels, enc_channels[-1]]
        for s in reversed(range(len(dec_channels))):
            up = GridUnpooling(widths[s + 1], enc_channels[s], widths[s])
            self.dec.add(PointSequential(up=up), name=f"dec{s}")
        self.seg_head = nn.Linear(dec_channels[0], num_classes)

    def forward(self, data_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        point = Point(data_dict)
        point.sparsify()
        point = self.dec(self.enc(self.embedding(point)))
        return self.seg_head(point.feat)


def build(
    in_channels: int = 6,
    num_classes: int = 20,
    enc_depths: Any = (2, 2, 2, 6, 2),
    enc_channels: Any = (36, 72, 144, 252, 504),
    enc_num_head: Any = (2, 4, 8, 14, 28),
    dec_channels: Any = (72, 72, 144, 252),
    conv_stages: int = 3,
    patch_size: int = 1024,
) -> nn.Module:
    return LitePT(
        in_channels, num_classes, enc_depths, enc_channels, enc_num_head, dec_channels, conv_stages, patch_size
    )
