"""SAM 3D Objects: structured latents grown from an image by a shortcut flow, decoded to a mesh.

Source: the paper (arXiv 2511.16624) and the project's public layer stack, on the modules of
TRELLIS. One step of the flow stands for its sampling; image tokens are part of the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import in_order
from .trellis_decoder import SLatMeshDecoder
from .trellis_flow import SLatFlowIO
from .trellis_sparse import LayerNorm32, SparseTensor, latent

TOKENS = 32


class MultiHeadRMSNorm(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.normalize(x.float(), dim=-1) * self.gamma * self.scale).to(x.dtype)


class SparseAttention(nn.Module):
    """Attention of rows [n, C] among themselves, or to a context [m, C']."""

    def __init__(self, channels: int, heads: int, context: int | None = None, norm: bool = False):
        super().__init__()
        self.heads, self.crosses = heads, context is not None
        if context is None:
            self.to_qkv = nn.Linear(channels, 3 * channels)
        else:
            self.to_q = nn.Linear(channels, channels)
            self.to_kv = nn.Linear(context, 2 * channels)
        self.normed = norm
        if norm:
            self.q_rms_norm = MultiHeadRMSNorm(channels // heads, heads)
            self.k_rms_norm = MultiHeadRMSNorm(channels // heads, heads)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if context is None:
            parts = self.to_qkv(x).chunk(3, dim=-1)
        else:
            parts = (self.to_q(x), *self.to_kv(context).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        if self.normed:
            q, k = self.q_rms_norm(q), self.k_rms_norm(k)
        q, k, v = (part.transpose(0, 1).contiguous() for part in (q, k, v))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self.to_out(out.transpose(0, 1).flatten(1))


class SparseFeedForwardNet(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(approximate="tanh"), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class ModulatedCrossBlock(nn.Module):
    """Full attention inside an item, attention to its image, MLP; the time scales and shifts."""

    def __init__(self, channels: int, context: int, heads: int):
        super().__init__()
        self.norm1 = LayerNorm32(channels, elementwise_affine=False, eps=1e-6)
        self.norm2 = LayerNorm32(channels, elementwise_affine=True, eps=1e-6)
        self.norm3 = LayerNorm32(channels, elementwise_affine=False, eps=1e-6)
        self.self_attn = SparseAttention(channels, heads, norm=True)
        self.cross_attn = SparseAttention(channels, heads, context)
        self.mlp = SparseFeedForwardNet(channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(channels, 6 * channels))

    def forward(self, x: torch.Tensor, emb: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """x: rows [n, C] of one item; emb: [C]; cond: [tokens, C']."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(emb).chunk(6)
        x = x + gate * self.self_attn(self.norm1(x) * (1 + scale) + shift)
        x = x + self.cross_attn(self.norm2(x), cond)
        return x + gate_mlp * self.mlp(self.norm3(x) * (1 + scale_mlp) + shift_mlp)


class SLatFlow(SLatFlowIO):
    """TRELLIS's flow, told in addition how long a step is."""

    def __init__(self, model_channels: int, io_channels: int, context: int, num_blocks: int):
        super().__init__(8, model_channels, io_channels, model_channels, use_fp16=False)
        del self.tokens
        self.d_embedder = nn.Sequential(
            nn.Linear(256, model_channels), nn.SiLU(), nn.Linear(model_channels, model_channels)
        )
        heads = model_channels // 64
        self.blocks = nn.ModuleList(ModulatedCrossBlock(model_channels, context, heads) for _ in range(num_blocks))

    def embedding(self, *times: torch.Tensor) -> torch.Tensor:
        t, d = (self.timestep(time).to(self.input_layer.weight.dtype) for time in times)
        return self.t_embedder(t) + self.d_embedder(d)

    def torso(self, h: SparseTensor, emb: torch.Tensor, *cond: torch.Tensor) -> SparseTensor:
        channels = h.feats.shape[1]
        rates = 10000 ** (-torch.arange(channels // 6, device=h.feats.device) / (channels // 6))
        angle = (h.coords[:, 1:, None] * rates).flatten(1)
        places = F.pad(torch.cat([angle.sin(), angle.cos()], 1), (0, channels - 2 * angle.shape[1]))
        feats = h.feats + places.to(h.feats.dtype)
        items = []
        for item, rows in enumerate(h.layout):
            x = feats[rows]
            for block in self.blocks if len(x) else ():
                x = block(x, emb[item], cond[0][item])
            items.append(x)
        return h.replace(torch.cat(items))


class WindowBlock(nn.Module):
    """Attention inside windows of eight cells, every other block's shifted by four; MLP."""

    def __init__(self, channels: int, heads: int, shift: int):
        super().__init__()
        self.shift = shift
        self.norm1 = LayerNorm32(channels, elementwise_affine=False, eps=1e-6)
        self.norm2 = LayerNorm32(channels, elementwise_affine=False, eps=1e-6)
        self.attn = SparseAttention(channels, heads)
        self.mlp = SparseFeedForwardNet(channels)

    def forward(self, h: SparseTensor) -> SparseTensor:
        cells = torch.cat([h.coords[:, :1], (h.coords[:, 1:] + self.shift) // 8], dim=1)
        _, window = torch.unique(cells, dim=0, return_inverse=True)
        order = torch.argsort(window, stable=True)
        x = self.norm1(h.feats)[order]
        parts = x.split(torch.bincount(window).tolist())
        found = torch.cat([self.attn(part) for part in parts])
        x = h.feats.index_add(0, order, found)
        return h.replace(x + self.mlp(self.norm2(x)))


class MeshDecoder(SLatMeshDecoder):
    """TRELLIS's decoder behind its transformer of windows."""

    def __init__(self, model_channels: int, num_blocks: int):
        super().__init__(64, model_channels, 8, use_color=True, use_fp16=False)
        heads = model_channels // 64
        self.blocks = nn.ModuleList(WindowBlock(model_channels, heads, 4 * (i % 2)) for i in range(num_blocks))

    def torso(self, h: SparseTensor) -> SparseTensor:
        for block in self.blocks:
            h = block(h)
        return h


class SAM3DObjects(nn.Module):
    def __init__(
        self,
        model_channels: int,
        io_channels: int,
        cond_channels: int,
        num_blocks: int,
        decoder_channels: int,
        decoder_blocks: int,
    ):
        super().__init__()
        self.slat_generator = SLatFlow(model_channels, io_channels, cond_channels, num_blocks)
        self.slat_decoder_mesh = MeshDecoder(decoder_channels, decoder_blocks)

    def forward(
        self, noise: torch.Tensor, coords: torch.Tensor, t: torch.Tensor, d: torch.Tensor, cond: torch.Tensor
    ) -> tuple[SparseTensor, SparseTensor]:
        """(latents after one step, values of the mesh at four times the resolution)"""
        velocity = self.slat_generator(noise, coords, (t, d), cond)
        slat = velocity.replace(noise + velocity.feats)
        return slat, self.slat_decoder_mesh(slat.feats, slat.coords)


def build(
    model_channels: int = 1024,
    io_channels: int = 128,
    cond_channels: int = 1024,
    num_blocks: int = 24,
    decoder_channels: int = 768,
    decoder_blocks: int = 12,
) -> nn.Module:
    return SAM3DObjects(model_channels, io_channels, cond_channels, num_blocks, decoder_channels, decoder_blocks)


def batch(scene: Any, device: Any, dtype: torch.dtype, cond_channels: int = 256) -> tuple:
    """(noise, voxels, time, step, image tokens)."""
    feats, coords = latent(scene, device, dtype)
    items = scene.batch_size
    rng = torch.Generator().manual_seed(0)
    cond = torch.randn(items, TOKENS, cond_channels, generator=rng).to(device, dtype)
    t = torch.full((items,), 1000.0, device=device)
    return feats, coords, t, t / 4, cond


def outputs(result: tuple[SparseTensor, SparseTensor]) -> list[torch.Tensor]:
    slat, mesh = result
    return [slat.feats, in_order(mesh.feats, mesh.coords)]
