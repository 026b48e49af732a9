"""The sparse modules of TRELLIS: a wrapper around spconv's tensor, and layers on it."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SPCONV_ALGO = os.environ.get("SPCONV_ALGO", "auto")
SparseTensorData = None


class SparseTensor:
    """Rows in batch order: coords [N, 4] int32 (batch, x, y, z), feats [N, ...].

    `data` is a SparseConvTensor whose `_features` may have more than two dimensions. What one
    resolution knows of another (rows of the finer one, for instance) lies in `_spatial_cache`.
    """

    def __init__(
        self,
        feats: torch.Tensor | None = None,
        coords: torch.Tensor | None = None,
        shape: Any = None,
        data: Any = None,
        layout: Any = None,
        scale: Any = (1, 1, 1),
        spatial_cache: dict | None = None,
    ):
        global SparseTensorData
        if SparseTensorData is None:
            SparseTensorData = importlib.import_module("spconv.pytorch").SparseConvTensor
        if data is None:
            assert feats is not None and coords is not None
            batch_size = int(coords[:, 0].max()) + 1 if shape is None else shape[0]
            shape = shape or torch.Size([batch_size, *feats.shape[1:]])
            spatial_shape = list(coords.max(0)[0] + 1)[1:]
            data = SparseTensorData(feats.reshape(feats.shape[0], -1), coords, spatial_shape, batch_size)
            data._features = feats
        self.data = data
        self.shape = shape or torch.Size([data.batch_size, *data.features.shape[1:]])
        self.layout = layout or self._layout(data.indices, self.shape[0])
        self._scale = tuple(scale)
        self._spatial_cache = {} if spatial_cache is None else spatial_cache

    @staticmethod
    def _layout(coords: torch.Tensor, batch_size: int) -> list[slice]:
        counts = torch.bincount(coords[:, 0], minlength=batch_size)
        ends = counts.cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]

    @property
    def feats(self) -> torch.Tensor:
        return self.data.features

    @property
    def coords(self) -> torch.Tensor:
        return self.data.indices

    def replace(self, feats: torch.Tensor, coords: torch.Tensor | None = None) -> SparseTensor:
        """Other features, and coordinates if given, with the same maps and caches."""
        old = self.data
        new = SparseTensorData(
            old.features.reshape(old.features.shape[0], -1),
            old.indices,
            old.spatial_shape,
            old.batch_size,
            old.grid,
            old.voxel_num,
            old.indice_dict,
        )
        new._features = feats
        for name in ("benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo", "int8_scale"):
            setattr(new, name, getattr(old, name))
        if coords is not None:
            new.indices = coords
        return SparseTensor(
            data=new,
            shape=torch.Size([old.batch_size, *feats.shape[1:]]),
            layout=self.layout,
            scale=self._scale,
            spatial_cache=self._spatial_cache,
        )

    def __add__(self, other: SparseTensor) -> SparseTensor:
        return self.replace(self.feats + other.feats)

    def type(self, dtype: torch.dtype) -> SparseTensor:
        return self.replace(self.feats.to(dtype))

    def register_spatial_cache(self, key: str, value: Any) -> None:
        self._spatial_cache.setdefault(str(self._scale), {})[key] = value

    def get_spatial_cache(self, key: str) -> Any:
        return self._spatial_cache.get(str(self._scale), {}).get(key)


class SparseConv3d(nn.Module):
    """Submanifold layer without stride and padding, else a regular one, rows in batch order."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
        padding: Any = None,
        bias: bool = True,
        indice_key: str | None = None,
    ):
        super().__init__()
        if "spconv" not in globals():
            import spconv.pytorch as spconv
        algo = None
        if SPCONV_ALGO == "native":
            algo = spconv.ConvAlgo.Native
        elif SPCONV_ALGO == "implicit_gemm":
            algo = spconv.ConvAlgo.MaskImplicitGemm
        options = {"dilation": dilation, "bias": bias, "indice_key": indice_key, "algo": algo}
        if stride == 1 and padding is None:
            self.conv = spconv.SubMConv3d(in_channels, out_channels, kernel_size, **options)
        else:
            self.conv = spconv.SparseConv3d(
                in_channels, out_channels, kernel_size, stride=stride, padding=padding or 0, **options
            )
        self.stride, self.padding = stride, padding

    def forward(self, x: SparseTensor) -> SparseTensor:
        changed = self.stride != 1 or self.padding is not None
        data = self.conv(x.data)
        if changed and x.shape[0] != 1:
            # Strided rows come in any order; everything here wants them batch by batch.
            order = data.indices[:, 0].argsort(stable=True)
            data = SparseTensorData(data.features[order], data.indices[order], data.spatial_shape, data.batch_size)
        return SparseTensor(
            data=data,
            shape=torch.Size([x.shape[0], self.conv.out_channels]),
            layout=None if changed else x.layout,
            scale=[self.stride * s for s in x._scale],
            spatial_cache=x._spatial_cache,
        )


class SparseLinear(nn.Linear):
    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace(super().forward(x.feats))


class SparseSiLU(nn.SiLU):
    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace(super().forward(x.feats))


class LayerNorm32(nn.LayerNorm):
    """Layer norm in float32, on a tensor or a sparse one."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, SparseTensor):
            return x.replace(self(x.feats))
        scale = [None if p is None else p.float() for p in (self.weight, self.bias)]
        return F.layer_norm(x.float(), self.normalized_shape, *scale, self.eps).to(x.dtype)


class SparseGroupNorm32(nn.GroupNorm):
    """Group norm in float32 over each batch item."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        made = torch.zeros_like(x.feats)
        for rows in x.layout:
            if rows.start == rows.stop:
                continue
            item = x.feats[rows].float().permute(1, 0).reshape(1, x.shape[1], -1)
            item = F.group_norm(item, self.num_groups, self.weight.float(), self.bias.float(), self.eps)
            made[rows] = item.reshape(x.shape[1], -1).permute(1, 0).to(made.dtype)
        return x.replace(made)


class SparseSubdivide(nn.Module):
    """Every voxel becomes its eight children, all with its features."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        corner = torch.ones((2, 2, 2), device=x.feats.device, dtype=torch.int)
        child = torch.nonzero(corner)
        child = torch.cat([torch.zeros_like(child[:, :1]), child], dim=-1).int()
        coords = x.coords.clone()
        coords[:, 1:] *= 2
        coords = (coords.unsqueeze(1) + child.unsqueeze(0)).flatten(0, 1)
        feats = x.feats.unsqueeze(1).expand(-1, 8, *x.feats.shape[1:]).flatten(0, 1)
        out = type(x)(feats, coords, x.shape)
        out._scale = tuple(2 * s for s in x._scale)
        out._spatial_cache = x._spatial_cache
        return out


class SparseDownsample(nn.Module):
    """Means over cells; the finer rows are remembered for SparseUpsample."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x: SparseTensor) -> SparseTensor:
        coords = torch.cat([x.coords[:, :1], x.coords[:, 1:] // self.factor], dim=1)
        extents = [int(extent) + 1 for extent in coords[:, 1:].max(0)[0]]
        code = coords[:, 0].long()
        for axis, extent in enumerate(extents):
            code = code * extent + coords[:, 1 + axis]
        code, index = code.unique(return_inverse=True)
        feats = torch.scatter_reduce(
            torch.zeros(len(code), x.feats.shape[1], device=x.feats.device, dtype=x.feats.dtype),
            0,
            index.unsqueeze(1).expand(-1, x.feats.shape[1]),
            x.feats,
            "mean",
            include_self=False,
        )
        columns = []
        for extent in reversed(extents):
            columns.insert(0, code % extent)
            code = code // extent
        sites = torch.stack([code, *columns], dim=1).int()
        out = type(x)(feats, sites, x.shape)
        out._scale = tuple(s / self.factor for s in x._scale)
        out._spatial_cache = x._spatial_cache
        out.register_spatial_cache("upsample", (x.coords, x.layout, index, x._scale))
        return out


class SparseUpsample(nn.Module):
    """Nearest neighbour, onto the rows that a SparseDownsample left behind."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        cached = x.get_spatial_cache("upsample")
        if cached is None:
            raise ValueError("no finer rows are known; downsample first")
        coords, layout, index, scale = cached
        return type(x)(x.feats[index], coords, x.shape, layout=layout, scale=scale, spatial_cache=x._spatial_cache)


def zero_module(module: nn.Module, std: float = 0.02) -> nn.Module:
    """Last layer of a residual branch. Published networks start it at 0 and have since trained it,
    so it is small and random here."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def convert_module_to_f16(module: nn.Module, conv: type = SparseConv3d) -> None:
    """Halve the parameters of sparse convolutions and linear layers; norms stay."""
    for child in module.modules():
        if isinstance(child, (conv, SparseLinear, nn.Linear)):
            for parameter in child.parameters():
                parameter.data = parameter.data.half()


def latent(scene: Any, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and int32 coordinates [N, 4] (batch, x, y, z), as the wrapper takes them."""
    return scene.features.to(device, dtype), scene.coords.int().to(device)
