"""Point Transformer V3: sparse stem and position encodings between attention over patches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import spconv.pytorch as spconv
import torch
import torch.nn.functional as F
from torch import nn

from .point_sequential import Point, PointModule, PointSequential
from .spunet import batch

__all__ = ["batch", "build"]

BatchNorm = functools.partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)


class SerializedAttention(PointModule):
    """Attention inside patches of points that are neighbours along a space-filling curve."""

    axes = (0, 1, 2)  # of the curve, the fastest one last

    def __init__(self, channels: int, num_heads: int, patch_size: int):
        super().__init__()
        self.num_heads, self.patch_size = num_heads, patch_size
        self.qkv = nn.Linear(channels, channels * 3)
        self.proj = nn.Linear(channels, channels)

    def patches(self, point: Point) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P * patch] in order of the curve, padded per batch item; place of each row."""
        order = torch.argsort(point.code(self.axes), stable=True)
        counts = torch.bincount(point.batch, minlength=len(point.offset)).tolist()
        size = max(1, min(self.patch_size, *[count for count in counts if count]))
        rows, places, start, filled = [], [], 0, 0
        for count in counts:
            padded = -(-count // size) * size
            place = torch.arange(padded, device=order.device)
            rows.append(order[start + place.clamp(max=max(count - 1, 0))] if count else order[:0])
            places.append(filled + place[:count])
            start, filled = start + count, filled + padded
        self.size = size
        inverse = torch.empty_like(order)
        inverse[order] = torch.cat(places)
        return torch.cat(rows), inverse

    def prepared(self, heads: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        """What happens to queries and keys [patch, head, n, d] at cells [patch, 1, n, 3]."""
        return heads

    def forward(self, point: Point) -> Point:
        rows, inverse = self.patches(point)
        c = point.feat.shape[1]
        qkv = self.qkv(point.feat)[rows].view(-1, self.size, 3, self.num_heads, c // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        coords = point.grid_coord[rows].view(-1, 1, self.size, 3)
        q, k = self.prepared(q, coords), self.prepared(k, coords)
        feat = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, c)[inverse]
        point.feat = self.proj(feat)
        return point


class MLP(nn.Sequential):
    def __init__(self, channels: int):
        super().__init__()
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * channels, channels)


class Block(PointModule):
    """Conditional position encoding (sparse, if it has a key), attention, MLP; pre-norm."""

    attention: type[SerializedAttention] = SerializedAttention

    def __init__(self, channels: int, num_heads: int, patch_size: int, cpe_indice_key: str | None = None):
        super().__init__()
        if cpe_indice_key is not None:
            self.cpe = PointSequential(
                spconv.SubMConv3d(channels, channels, kernel_size=3, bias=True, indice_key=cpe_indice_key),
                nn.Linear(channels, channels),
                nn.LayerNorm(channels),
            )
        self.norm1 = PointSequential(nn.LayerNorm(channels))
        self.attn = self.attention(channels, num_heads, patch_size)
        self.norm2 = PointSequential(nn.LayerNorm(channels))
        self.mlp = PointSequential(MLP(channels))

    def forward(self, point: Point) -> Point:
        branches = [(self.norm1, self.attn), (self.norm2, self.mlp)]
        if hasattr(self, "cpe"):
            branches.insert(0, (self.cpe,))
        for steps in branches:
            shortcut = point.feat
            for step in steps:
                point = step(point)
            point.feat = shortcut + point.feat
        point.sparse_conv_feat = point.sparse_conv_feat.replace_feature(point.feat)
        return point


class GridPooling(PointModule):
    """Maximum over the points of each coarser cell."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.proj = nn.Linear(in_channels, out_channels)
        self.norm = PointSequential(BatchNorm(out_channels))
        self.act = PointSequential(nn.GELU())

    def forward(self, point: Point) -> Point:
        cells = torch.cat([point.batch[:, None], point.grid_coord // 2], dim=1)
        unique, cluster = torch.unique(cells, sorted=True, return_inverse=True, dim=0)
        feat = self.proj(point.feat)
        pooled = feat.new_zeros(len(unique), feat.shape[1]).scatter_reduce(
            0, cluster[:, None].expand_as(feat), feat, "amax", include_self=False
        )
        items = torch.bincount(unique[:, 0], minlength=len(point.offset))
        made = Point(
            feat=pooled,
            grid_coord=unique[:, 1:],
            batch=unique[:, 0],
            offset=items.cumsum(0),
            pooling_inverse=cluster,
            pooling_parent=point,
        )
        made = self.act(self.norm(made))
        made.sparsify()
        return made


class GridUnpooling(PointModule):
    """Features of the coarser cell added to the projected ones of the encoder."""

    def __init__(self, in_channels: int, skip_channels: int, out_channels: int):
        super().__init__()
        self.proj = PointSequential(nn.Linear(in_channels, out_channels), BatchNorm(out_channels), nn.GELU())
        self.proj_skip = PointSequential(nn.Linear(skip_channels, out_channels), BatchNorm(out_channels), nn.GELU())

    def forward(self, point: Point) -> Point:
        parent, inverse = point.pop("pooling_parent"), point.pop("pooling_inverse")
        point, parent = self.proj(point), self.proj_skip(parent)
        parent.feat = parent.feat + point.feat[inverse]
        parent.sparse_conv_feat = parent.sparse_conv_feat.replace_feature(parent.feat)
        return parent


class Embedding(PointModule):
    def __init__(self, in_channels: int, embed_channels: int):
        super().__init__()
        self.stem = PointSequential(
            conv=spconv.SubMConv3d(
                in_channels, embed_channels, kernel_size=5, padding=1, bias=False, indice_key="stem"
            ),
            norm=BatchNorm(embed_channels),
            act=nn.GELU(),
        )

    def forward(self, point: Point) -> Point:
        return self.stem(point)


def encoder(
    depths: Sequence[int],
    block: Callable[[int, int], nn.Module],
    down: Callable[[int], nn.Module],
    name: str | None = "down",
) -> PointSequential:
    """Stages of `depths[s]` blocks, `block(s, i)`; all but the first begin with `down(s)`."""
    enc = PointSequential()
    for s, depth in enumerate(depths):
        stage = PointSequential()
        if s > 0:
            stage.add(down(s), name=name)
        for i in range(depth):
            stage.add(block(s, i), name=f"block{i}")
        enc.add(stage, name=f"enc{s}")
    return enc


class PointTransformerV3(PointModule):
    """Five encoder and four decoder stages."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        enc_depths: Any,
        enc_channels: Any,
        enc_num_head: Any,
        dec_depths: Any,
        dec_channels: Any,
        dec_num_head: Any,
        patch_size: int,
    ):
        super().__init__()
        self.embedding = Embedding(in_channels, enc_channels[0])
        self.enc = encoder(
            enc_depths,
            lambda s, _: Block(enc_channels[s], enc_num_head[s], patch_size, f"stage{s}"),
            lambda s: GridPooling(enc_channels[s - 1], enc_channels[s]),
        )
        self.dec = PointSequential()
        widths = [*dec_channels, enc_channels[-1]]
        for s in reversed(range(len(dec_channels))):
            stage = PointSequential()
            stage.add(GridUnpooling(widths[s + 1], enc_channels[s], widths[s]), name="up")
            for i in range(dec_depths[s]):
                block = Block(widths[s], dec_num_head[s], patch_size, f"stage{s}")
                stage.add(block, name=f"block{i}")
            self.dec.add(stage, name=f"dec{s}")
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
    enc_channels: Any = (32, 64, 128, 256, 512),
    enc_num_head: Any = (2, 4, 8, 16, 32),
    dec_depths: Any = (2, 2, 2, 2),
    dec_channels: Any = (64, 64, 128, 256),
    dec_num_head: Any = (4, 4, 8, 16),
    patch_size: int = 1024,
) -> nn.Module:
    return PointTransformerV3(
        in_channels,
        num_classes,
        enc_depths,
        enc_channels,
        enc_num_head,
        dec_depths,
        dec_channels,
        dec_num_head,
        patch_size,
    )
