"""TRELLIS.2's VAE: submanifold blocks between space-to-channel and its inverse.

With `points` the decoder's voxels are sampled as its renderers and texture baking do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..spconv.trellis_sparse import LayerNorm32, SparseLinear, SparseTensor, convert_module_to_f16, latent, zero_module
from .trellis2_sparse import CONVOLUTIONS


class SparseConvNeXtBlock3d(nn.Module):
    """Submanifold layer, norm, MLP of ratio 4, residual; recomputed in backward on request."""

    def __init__(self, channels: int, conv: Any, mlp_ratio: float = 4.0, use_checkpoint: bool = False):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.norm = LayerNorm32(channels, elementwise_affine=True, eps=1e-6)
        self.conv = conv(channels, channels, 3)
        hidden = int(channels * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), zero_module(nn.Linear(hidden, channels)))

    def _forward(self, x: SparseTensor) -> SparseTensor:
        h = self.norm(self.conv(x))
        return h.replace(self.mlp(h.feats)) + x

    def forward(self, x: SparseTensor) -> SparseTensor:
        if self.use_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


def space_to_channel(x: SparseTensor) -> SparseTensor:
    """Cells of 2^3 voxels as one row of eight times the channels; absent children are zeros."""
    parents = torch.cat([x.coords[:, :1], x.coords[:, 1:] // 2], dim=1)
    sites, row = torch.unique(parents, dim=0, return_inverse=True)
    child = (x.coords[:, 1:] % 2 * x.coords.new_tensor([4, 2, 1])).sum(1).long()
    channels = x.feats.shape[1]
    feats = x.feats.new_zeros(len(sites) * 8, channels)
    feats = feats.index_add(0, row * 8 + child, x.feats)
    occupied = torch.zeros(len(sites) * 8, dtype=torch.bool, device=row.device)
    occupied[row * 8 + child] = True
    out = type(x)(feats.view(len(sites), 8 * channels), sites, torch.Size([x.shape[0], 8 * channels]))
    out._scale = tuple(s / 2 for s in x._scale)
    out._spatial_cache = x._spatial_cache
    out.register_spatial_cache("children", occupied.view(-1, 8))
    return out


def channel_to_space(x: SparseTensor, children: torch.Tensor) -> SparseTensor:
    """The marked children [N, 8] of every voxel, an eighth of the channels each."""
    row, child = children.nonzero().unbind(1)
    channels = x.feats.shape[1] // 8
    offset = torch.stack([child // 4, child // 2 % 2, child % 2], dim=1).int()
    sites = torch.cat([x.coords[row, :1], x.coords[row, 1:] * 2 + offset], dim=1)
    feats = x.feats.view(-1, 8, channels)[row, child]
    out = type(x)(feats, sites, torch.Size([x.shape[0], channels]))
    out._scale = tuple(s * 2 for s in x._scale)
    out._spatial_cache = x._spatial_cache
    return out


class SparseResBlockS2C3d(nn.Module):
    """Half the resolution: eight voxels become one of eight narrow groups of channels."""

    def __init__(self, channels: int, out_channels: int, conv: Any):
        super().__init__()
        self.norm1 = LayerNorm32(channels, elementwise_affine=True, eps=1e-6)
        self.norm2 = LayerNorm32(out_channels, elementwise_affine=False, eps=1e-6)
        self.conv1 = conv(channels, out_channels // 8, 3)
        self.conv2 = zero_module(conv(out_channels, out_channels, 3))
        self.out_channels = out_channels

    def forward(self, x: SparseTensor) -> SparseTensor:
        h = self.norm1(x)
        h = self.conv1(h.replace(F.silu(h.feats)))
        h, x = space_to_channel(h), space_to_channel(x)
        h = self.norm2(h)
        h = self.conv2(h.replace(F.silu(h.feats)))
        skip = x.feats.reshape(len(x.feats), self.out_channels, -1).mean(dim=-1)
        return h.replace(h.feats + skip)


class SparseResBlockC2S3d(nn.Module):
    """Twice the resolution, at the children that are given or predicted."""

    def __init__(self, channels: int, out_channels: int, conv: Any):
        super().__init__()
        self.norm1 = LayerNorm32(channels, elementwise_affine=True, eps=1e-6)
        self.norm2 = LayerNorm32(out_channels, elementwise_affine=False, eps=1e-6)
        self.conv1 = conv(channels, out_channels * 8, 3)
        self.conv2 = zero_module(conv(out_channels, out_channels, 3))
        self.to_subdiv = SparseLinear(channels, 8)
        self.channels, self.out_channels = channels, out_channels

    def forward(self, x: SparseTensor, children: torch.Tensor | None) -> Any:
        subdiv = self.to_subdiv(x)
        if children is None:
            children = subdiv.feats > 0
            # A voxel without children would vanish: its likeliest one stays.
            likeliest = subdiv.feats.argmax(dim=1, keepdim=True)
            children = children.scatter(1, likeliest, True)
        h = self.norm1(x)
        h = self.conv1(h.replace(F.silu(h.feats)))
        h, x = channel_to_space(h, children), channel_to_space(x, children)
        h = self.norm2(h)
        h = self.conv2(h.replace(F.silu(h.feats)))
        skip = x.feats.repeat_interleave(self.out_channels * 8 // self.channels, dim=1)
        return h.replace(h.feats + skip), subdiv


class ShapeVae(nn.Module):
    """Encoder and decoder; while training the decoder grows along the encoder's voxels."""

    def __init__(
        self,
        in_channels: int,
        latent_channels: int,
        model_channels: Any,
        num_blocks: Any,
        use_checkpoint: bool,
        use_fp16: bool,
        grow: bool,
        backend: str,
        points: int,
    ):
        super().__init__()
        conv = CONVOLUTIONS[backend]
        self.tensor, self.points = conv.tensor, points
        self.dtype, self.grow = torch.float16 if use_fp16 else None, grow
        widths, levels = list(model_channels), len(model_channels)
        self.input_layer = SparseLinear(in_channels, widths[0])
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for i, (width, count) in enumerate(zip(widths, num_blocks, strict=True)):
            blocks = [SparseConvNeXtBlock3d(width, conv, use_checkpoint=use_checkpoint) for _ in range(count)]
            if i < levels - 1:
                blocks.append(SparseResBlockS2C3d(width, widths[i + 1], conv))
            self.encoder.append(nn.ModuleList(blocks))
        self.to_latent = SparseLinear(widths[-1], 2 * latent_channels)
        self.from_latent = SparseLinear(latent_channels, widths[-1])
        for i in reversed(range(levels)):
            blocks = [
                SparseConvNeXtBlock3d(widths[i], conv, use_checkpoint=use_checkpoint) for _ in range(num_blocks[i])
            ]
            if i > 0:
                blocks.append(SparseResBlockC2S3d(widths[i], widths[i - 1], conv))
            self.decoder.append(nn.ModuleList(blocks))
        self.output_layer = SparseLinear(widths[0], in_channels)
        if use_fp16:
            for part in (self.encoder, self.decoder):
                convert_module_to_f16(part, conv)

    def encode(self, x: SparseTensor) -> tuple[SparseTensor, list[torch.Tensor]]:
        """Latent means, and the occupied children of every level from coarse to fine."""
        h, children = self.input_layer(x), []
        h = h if self.dtype is None else h.type(self.dtype)
        for blocks in self.encoder:
            for block in blocks:
                h = block(h)
                if isinstance(block, SparseResBlockS2C3d):
                    children.insert(0, h.get_spatial_cache("children"))
        h = self.to_latent(h.type(x.feats.dtype))
        mean, _ = h.feats.chunk(2, dim=-1)
        return h.replace(mean), children

    def decode(self, z: SparseTensor, children: list[torch.Tensor] | None) -> Any:
        # Latents arrive alone: the decoder's voxels need not be the encoder's.
        scale, z = z._scale, type(z)(z.feats, z.coords, z.shape)
        z._scale = scale
        h, predicted = self.from_latent(z), []
        h = h if self.dtype is None else h.type(self.dtype)
        for blocks in self.decoder:
            for block in blocks:
                if isinstance(block, SparseResBlockC2S3d):
                    known = children[len(predicted)] if children else None
                    h, subdiv = block(h, known)
                    predicted.append(subdiv)
                else:
                    h = block(h)
        h = h.type(z.feats.dtype)
        h = h.replace(F.layer_norm(h.feats, h.feats.shape[-1:]))
        return self.output_layer(h), predicted

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> Any:
        z, children = self.encode(self.tensor(feats, coords))
        grow = self.grow and not self.training
        out, subdivisions = self.decode(z, None if grow else children)
        found = {"out": out, "latent": z, "subdivisions": subdivisions}
        if self.points:
            found["samples"] = self.sample(out)
        return found

    def sample(self, x: SparseTensor) -> list[torch.Tensor]:
        """Attributes at points near the surface, by both modes."""
        from flex_gemm.ops.grid_sample import grid_sample_3d

        rows = torch.linspace(0, len(x.coords) - 1, self.points).long().to(x.coords.device)
        near = x.coords[rows, 1:].float() + 0.5
        near = near + 0.4 * torch.sin(torch.arange(near.numel(), device=near.device)).view_as(near)
        shape = torch.Size([x.shape[0], x.feats.shape[1], *x.spatial_shape])
        grid = near.unsqueeze(0).expand(x.shape[0], -1, -1)
        feats, coords = x.feats.contiguous(), x.coords
        return [grid_sample_3d(feats, coords, shape=shape, grid=grid, mode=mode) for mode in ("trilinear", "nearest")]


def build(
    in_channels: int = 6,
    latent_channels: int = 32,
    model_channels: Any = (64, 128, 256, 512, 1024),
    num_blocks: Any = (0, 4, 8, 16, 4),
    use_checkpoint: bool = True,
    use_fp16: bool = False,
    grow: bool = True,
    backend: str = "flex_gemm",
    points: int = 0,
) -> nn.Module:
    return ShapeVae(
        in_channels, latent_channels, model_channels, num_blocks, use_checkpoint, use_fp16, grow, backend, points
    )


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return latent(scene, device, dtype)


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [result["out"], result["latent"], *result["subdivisions"]]
    return [*(in_order(x.feats, x.coords) for x in tensors), *result.get("samples", ())]


def in_order(feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    """Rows in the order of their coordinates."""
    order = torch.arange(len(coords), device=coords.device)
    for column in reversed(range(coords.shape[1])):
        order = order[torch.argsort(coords[order, column], stable=True)]
    return feats[order]
