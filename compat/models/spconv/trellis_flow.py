"""Input and output blocks of TRELLIS's structured-latent flow model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .trellis_sparse import (
    LayerNorm32,
    SparseConv3d,
    SparseDownsample,
    SparseLinear,
    SparseTensor,
    SparseUpsample,
    convert_module_to_f16,
    latent,
    zero_module,
)


class SparseResBlock3d(nn.Module):
    """Residual block, modulated by the time step, that may change the resolution first."""

    def __init__(
        self, channels: int, emb_channels: int, out_channels: int, downsample: bool = False, upsample: bool = False
    ):
        super().__init__()
        self.norm1 = LayerNorm32(channels, elementwise_affine=True, eps=1e-6)
        self.norm2 = LayerNorm32(out_channels, elementwise_affine=False, eps=1e-6)
        self.conv1 = SparseConv3d(channels, out_channels, 3)
        self.conv2 = zero_module(SparseConv3d(out_channels, out_channels, 3))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, 2 * out_channels, bias=True))
        self.skip_connection = nn.Identity()
        if channels != out_channels:
            self.skip_connection = SparseLinear(channels, out_channels)
        self.updown = None
        if downsample:
            self.updown = SparseDownsample(2)
        elif upsample:
            self.updown = SparseUpsample()

    def forward(self, x: SparseTensor, emb: torch.Tensor) -> SparseTensor:
        scale, shift = torch.chunk(self.emb_layers(emb).type(x.feats.dtype), 2, dim=1)
        if self.updown is not None:
            x = self.updown(x)
        h = self.norm1(x)
        h = h.replace(F.silu(h.feats))
        h = self.norm2(self.conv1(h))
        rows = h.coords[:, 0].long()
        h = h.replace(F.silu(h.feats * (1 + scale[rows]) + shift[rows]))
        return self.conv2(h) + self.skip_connection(x)


class SLatFlowIO(nn.Module):
    """The blocks around the transformer: down to half the resolution, tokens, and back."""

    def __init__(self, in_channels: int, model_channels: int, io_channels: int, emb_channels: int, use_fp16: bool):
        super().__init__()
        self.dtype = torch.float16 if use_fp16 else None
        io, model = io_channels, model_channels
        self.t_embedder = nn.Sequential(nn.Linear(256, emb_channels), nn.SiLU(), nn.Linear(emb_channels, emb_channels))
        self.input_layer = SparseLinear(in_channels, io)
        self.input_blocks = nn.ModuleList(
            [SparseResBlock3d(io, emb_channels, io), SparseResBlock3d(io, emb_channels, model, downsample=True)]
        )
        # One MLP per token takes the place of the transformer.
        self.tokens = nn.Sequential(nn.Linear(model, model), nn.GELU(approximate="tanh"))
        self.out_blocks = nn.ModuleList(
            [SparseResBlock3d(2 * model, emb_channels, io, upsample=True), SparseResBlock3d(2 * io, emb_channels, io)]
        )
        self.out_layer = SparseLinear(io, in_channels)
        if use_fp16:
            for part in (self.input_blocks, self.tokens, self.out_blocks):
                convert_module_to_f16(part)

    @staticmethod
    def timestep(t: torch.Tensor) -> torch.Tensor:
        """Sines and cosines [B, 256] of the time."""
        rates = torch.exp(-9.21 * torch.arange(128, device=t.device) / 128)
        angle = t[:, None].float() * rates
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def torso(self, h: SparseTensor, emb: torch.Tensor, *cond: torch.Tensor) -> SparseTensor:
        """What the transformer does to the tokens."""
        return h.replace(h.feats + self.tokens(h.feats))

    def embedding(self, *times: torch.Tensor) -> torch.Tensor:
        return self.t_embedder(self.timestep(times[0]).to(self.input_layer.weight.dtype))

    def forward(self, feats: torch.Tensor, coords: torch.Tensor, t: Any, *cond: torch.Tensor) -> SparseTensor:
        """t: times [B], or a tuple of such; cond: what the tokens are told besides."""
        h = self.input_layer(SparseTensor(feats, coords))
        emb = self.embedding(*(t if isinstance(t, tuple) else (t,)))
        dtype = h.feats.dtype
        if self.dtype is not None:
            h, emb = h.type(self.dtype), emb.to(self.dtype)
        skips = []
        for block in self.input_blocks:
            h = block(h, emb)
            skips.append(h.feats)
        h = self.torso(h, emb, *cond)
        for block, skip in zip(self.out_blocks, reversed(skips), strict=True):
            h = block(h.replace(torch.cat([h.feats, skip], dim=1)), emb)
        h = h.type(dtype)
        h = h.replace(F.layer_norm(h.feats, h.feats.shape[-1:]))
        return self.out_layer(h)


def build(
    in_channels: int = 8,
    model_channels: int = 1024,
    io_channels: int = 128,
    emb_channels: int = 1024,
    use_fp16: bool = False,
) -> nn.Module:
    return SLatFlowIO(in_channels, model_channels, io_channels, emb_channels, use_fp16)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    t = torch.linspace(100, 900, scene.batch_size, device=device)
    return (*latent(scene, device, dtype), t)


def outputs(result: SparseTensor) -> list[torch.Tensor]:
    return [result.feats]
