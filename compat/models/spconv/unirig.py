"""UniRig's skinning network: Point Transformer V3 without any pooling over the vertices of a mesh,
to which bones attend.

Source: the paper (arXiv 2504.12451) and the project's public layer stack. The encoder of global
shape has no sparse layer; a learned set of latents takes its place.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import offsets
from .point_sequential import Point, PointModule
from .ptv3 import Block, Embedding, SerializedAttention, encoder

BONES = 12


class Attention(SerializedAttention):
    """Queries and keys have norms without parameters."""

    def prepared(self, heads: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(heads, heads.shape[-1:])


class SwappedAttention(Attention):
    """The curve of every other block, with the first two axes swapped."""

    axes = (1, 0, 2)


class ObjectBlock(Block):
    attention = Attention


class SwappedBlock(Block):
    attention = SwappedAttention


class ObjectEmbedding(Embedding):
    """The stem of kernel 5 beside a linear layer."""

    def __init__(self, in_channels: int, embed_channels: int):
        super().__init__(in_channels, embed_channels)
        self.res_linear = nn.Linear(in_channels, embed_channels)

    def forward(self, point: Point) -> Point:
        beside = self.res_linear(point.feat)
        point = super().forward(point)
        point.feat = point.feat + beside
        point.sparse_conv_feat = point.sparse_conv_feat.replace_feature(point.feat)
        return point


class PointTransformerV3Object(PointModule):
    """All stages see all points; widths change by linear layers."""

    def __init__(self, in_channels: int, enc_depths: Any, enc_channels: Any, enc_num_head: Any, patch_size: int):
        super().__init__()
        self.embedding = ObjectEmbedding(in_channels, enc_channels[0])

        def block(s: int, i: int) -> nn.Module:
            kind = SwappedBlock if i % 2 else ObjectBlock
            return kind(enc_channels[s], enc_num_head[s], patch_size, f"stage{s}")

        self.enc = encoder(enc_depths, block, lambda s: nn.Linear(enc_channels[s - 1], enc_channels[s]), name=None)

    def forward(self, data_dict: dict[str, torch.Tensor]) -> Point:
        point = Point(data_dict)
        point.sparsify()
        return self.enc(self.embedding(point))


class ResidualCrossAttn(nn.Module):
    """Post-norm attention of [B, N, C] to [B, M, C], and a feed-forward part."""

    def __init__(self, feat_dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(feat_dim), nn.LayerNorm(feat_dim)
        self.attention = nn.MultiheadAttention(feat_dim, num_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(feat_dim, feat_dim * 4), nn.GELU(), nn.Linear(feat_dim * 4, feat_dim))

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        x = self.norm1(q + self.attention(q, kv, kv, need_weights=False)[0])
        return self.norm2(x + self.ffn(x))


def stack(*widths: int) -> nn.Sequential:
    """Linear layers, each followed by a norm and an activation."""
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise(widths):
        layers += [nn.Linear(before, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers)


class UniRigSkin(nn.Module):
    """Weights [N, J] of the bones of every item at its vertices; rows sum to one."""

    def __init__(
        self,
        encoder_options: dict[str, Any],
        feat_dim: int,
        num_heads: int,
        mlp_dim: int,
        num_bone_attn: int,
        num_mesh_bone_attn: int,
        latents: int,
    ):
        super().__init__()
        self.num_heads, self.feat_dim = num_heads, feat_dim
        self.mesh_encoder = PointTransformerV3Object(**encoder_options)
        self.feat_map = stack(encoder_options["enc_channels"][-1], feat_dim)
        self.latents = nn.Parameter(torch.randn(latents, feat_dim) * 0.02)
        self.bone_encoder = stack(6, mlp_dim, feat_dim)
        self.bone_attn = nn.ModuleList(ResidualCrossAttn(feat_dim, num_heads) for _ in range(num_bone_attn))
        self.mesh_bone_attn = nn.ModuleList(ResidualCrossAttn(feat_dim, num_heads) for _ in range(num_mesh_bone_attn))
        self.qmesh = nn.Linear(feat_dim, feat_dim * num_heads)
        self.kmesh = nn.Linear(feat_dim, feat_dim * num_heads)
        self.skinweight_pred = nn.Sequential(
            nn.LayerNorm(num_heads), stack(num_heads, mlp_dim, mlp_dim), nn.Linear(mlp_dim, 1)
        )

    def forward(self, data_dict: dict[str, torch.Tensor], bones: torch.Tensor) -> torch.Tensor:
        point = self.mesh_encoder(data_dict)
        feat = self.feat_map(point.feat)
        parts = [self.item(feat[point.batch == item][None], bones[item][None])[0] for item in range(len(bones))]
        return torch.cat(parts)

    def item(self, mesh: torch.Tensor, bones: torch.Tensor) -> torch.Tensor:
        latents = self.latents[None]
        bone = self.bone_encoder(bones)
        for layer in self.bone_attn:
            bone = layer(bone, torch.cat([bone, latents], dim=1))
        for layer in self.mesh_bone_attn:
            mesh = layer(mesh, torch.cat([bone, latents], dim=1))
        q, k = (
            head(x).view(1, -1, self.num_heads, self.feat_dim).transpose(1, 2)
            for head, x in ((self.qmesh, mesh), (self.kmesh, bone))
        )
        weights = (q @ k.transpose(-2, -1) / math.sqrt(self.feat_dim)).softmax(dim=-1)
        return self.skinweight_pred(weights.permute(0, 2, 3, 1)).squeeze(-1).softmax(dim=-1)


def build(
    in_channels: int = 9,
    enc_depths: Any = (3, 3, 3, 6, 16),
    enc_channels: Any = (32, 64, 128, 256, 384),
    enc_num_head: Any = (2, 4, 8, 16, 24),
    patch_size: int = 1024,
    feat_dim: int = 768,
    num_heads: int = 16,
    mlp_dim: int = 512,
    num_bone_attn: int = 8,
    num_mesh_bone_attn: int = 16,
    latents: int = 512,
) -> nn.Module:
    encoder_options = {
        "in_channels": in_channels,
        "enc_depths": enc_depths,
        "enc_channels": enc_channels,
        "enc_num_head": enc_num_head,
        "patch_size": patch_size,
    }
    return UniRigSkin(encoder_options, feat_dim, num_heads, mlp_dim, num_bone_attn, num_mesh_bone_attn, latents)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    """(vertices with normals, joints and tails of twelve bones)."""
    points = scene.points - scene.points.mean(dim=0)
    data = {
        "feat": torch.cat([points, scene.features, torch.zeros_like(points)], 1).to(device, dtype),
        "grid_coord": scene.coords[:, 1:].long().to(device),
        "offset": offsets(scene).to(device),
    }
    rng = torch.Generator().manual_seed(0)
    bones = torch.randn(scene.batch_size, BONES, 6, generator=rng)
    return data, bones.to(device, dtype)
