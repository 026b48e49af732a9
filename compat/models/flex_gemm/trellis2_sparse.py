"""TRELLIS.2's sparse modules: one tensor, and a convolution for each of its three backends.

The project reads the backend from an environment variable; here it is an option of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..spconv import trellis_sparse
from ..torchsparse import direct3d_sdf_decoder as torchsparse_wrapper

__all__ = ["CONVOLUTIONS", "PlainTensor", "TorchsparseTensor"]


class PlainTensor(trellis_sparse.SparseTensor):
    """Rows in batch order: `data` holds features and coordinates; neighbour caches travel in
    `_spatial_cache`, by resolution."""

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor,
        shape: Any = None,
        scale: Any = (1, 1, 1),
        spatial_cache: dict | None = None,
        layout: Any = None,
    ):
        self.layout = layout
        self.data = {"feats": feats, "coords": coords}
        batch_size = int(coords[:, 0].max()) + 1 if shape is None else shape[0]
        self.shape = shape or torch.Size([batch_size, *feats.shape[1:]])
        self._scale = tuple(scale)
        self._spatial_cache = {} if spatial_cache is None else spatial_cache

    @property
    def feats(self) -> torch.Tensor:
        return self.data["feats"]

    @property
    def coords(self) -> torch.Tensor:
        return self.data["coords"]

    @property
    def spatial_shape(self) -> torch.Size:
        found = self.get_spatial_cache("shape")
        if found is None:
            found = torch.Size((self.coords.max(0)[0][1:] + 1).tolist())
            self.register_spatial_cache("shape", found)
        return found

    def replace(self, feats: torch.Tensor, coords: torch.Tensor | None = None) -> PlainTensor:
        """Other features, and coordinates if given."""
        return type(self)(
            feats,
            self.coords if coords is None else coords,
            torch.Size([self.shape[0], *feats.shape[1:]]),
            self._scale,
            self._spatial_cache,
        )


class FlexGemmConv3d(nn.Module):
    """Submanifold layer on `flex_gemm`; stride and padding are refused, as in the project."""

    tensor = PlainTensor

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
        assert stride == 1 and padding is None, "only submanifold layers run on flex_gemm"
        self.kernel_size = (kernel_size,) * 3
        self.dilation = (dilation,) * 3
        weight = torch.empty((out_channels, in_channels, *self.kernel_size))
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        self.weight = nn.Parameter(weight.permute(0, 2, 3, 4, 1).contiguous())
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(self, x: PlainTensor) -> PlainTensor:
        import flex_gemm
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        flex_gemm.ops.spconv.set_algorithm("masked_implicit_gemm_splitk")
        flex_gemm.ops.spconv.set_hashmap_ratio(2.0)
        key = f"SubMConv3d_neighbor_cache_{self.kernel_size}_{self.dilation}"
        known = x.get_spatial_cache(key)
        out, cache = sparse_submanifold_conv3d(
            x.feats, x.coords, torch.Size([*x.shape, *x.spatial_shape]), self.weight, self.bias, known, self.dilation
        )
        if known is None:
            x.register_spatial_cache(key, cache)
        return x.replace(out)


class TorchsparseTensor(PlainTensor):
    """The same over a torchsparse.SparseTensor, whose caches travel with it."""

    def __init__(self, feats, coords, shape=None, scale=(1, 1, 1), spatial_cache=None, layout=None):
        super().__init__(feats, coords, shape, scale, spatial_cache, layout)
        made = torchsparse_wrapper.SparseTensor(feats=feats, coords=coords).data
        known = self.get_spatial_cache("torchsparse")
        if known is None:
            self.register_spatial_cache("torchsparse", made._caches)
        else:
            made._caches = known
        self.sparse = made


class TorchsparseConv3d(nn.Module):
    """Stride 1 on torchsparse."""

    tensor = TorchsparseTensor

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
        import torchsparse

        self.conv = torchsparse.nn.Conv3d(in_channels, out_channels, kernel_size, stride, 0, dilation, bias)

    def forward(self, x: TorchsparseTensor) -> TorchsparseTensor:
        return x.replace(self.conv(x.sparse).feats)


class SpconvConv3d(trellis_sparse.SparseConv3d):
    """A submanifold layer on spconv."""

    tensor = trellis_sparse.SparseTensor


class ChunkedConv3d(FlexGemmConv3d):
    """The layer of low-memory nodes: neighbour maps read slice by slice, products in torch."""

    chunk = 4096

    def forward(self, x: PlainTensor) -> PlainTensor:
        from flex_gemm.ops.spconv import SubMConv3dFunction

        shape = torch.Size([*x.shape, *x.spatial_shape])
        cache = SubMConv3dFunction._compute_neighbor_cache(x.coords, shape, self.kernel_size, self.dilation)
        weight, parts = self.weight.reshape(self.weight.shape[0], -1).t(), []
        for begin in range(0, len(x.coords), self.chunk):
            rows = cache["neighbor_map"][begin : begin + self.chunk].reshape(-1).long()
            present = rows != 0xFFFFFFFF
            column = x.feats.new_zeros(len(rows), x.feats.shape[1])
            column = column.index_put((present.nonzero().squeeze(1),), x.feats[rows[present]])
            parts.append(column.view(-1, weight.shape[0]) @ weight)
        out = torch.cat(parts)
        return x.replace(out if self.bias is None else out + self.bias)


CONVOLUTIONS = {
    "flex_gemm": FlexGemmConv3d,
    "chunked": ChunkedConv3d,
    "spconv": SpconvConv3d,
    "torchsparse": TorchsparseConv3d,
}
