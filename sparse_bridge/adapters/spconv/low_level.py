"""The functional layer below spconv's modules: pair tensors in, feature tensors out.

Pair tensors follow spconv's layouts: `indice_pairs` int32 [2, V, N] padded with -1 plus
`indice_pair_num` [V], or `pair_fwd` int32 [V, M] with -1 for absent. Kernel maps made from them are
remembered as long as the tensors live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...core.conv.convolution import conv
from ...core.geometry.boxes import Box
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_builder import from_pairs
from ...core.maps.row_pairs import dense_table
from ...core.ops import pool as core_pool
from ...errors import ShapeError
from . import geometry, maps
from .layers import allow_tf32, check_parameters

__all__ = [
    "avg_pool",
    "build_map",
    "conv_backward",
    "conv_by_pairs",
    "conv_by_table",
    "global_pool_rearrange",
    "map_from_pairs",
    "map_from_table",
    "max_pool",
]

_maps: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


def _remember(tensor: torch.Tensor, key: Any, build: Any) -> KernelMap:
    stamp = (tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
    with _lock:
        entries = _maps.get(tensor)
        if entries is None or entries[0] != stamp:
            entries = _maps[tensor] = (stamp, {})
        if key not in entries[1]:
            entries[1][key] = build()
        return entries[1][key]


def map_from_pairs(
    pairs: torch.Tensor, counts: torch.Tensor, n_in: int, n_out: int, subm: bool
) -> KernelMap:
    """pairs [2, V, N] and counts [V] -> kernel map.

    Submanifold counts cover the first half of the offsets only; the centre pairs every row with
    itself. Raises ShapeError.
    """
    if pairs.ndim != 3 or pairs.shape[0] != 2 or counts.shape != (pairs.shape[1],):
        raise ShapeError(
            f"indice_pairs {list(pairs.shape)} with counts {list(counts.shape)}; expected "
            "[2, V, N] and [V]."
        )

    def build() -> KernelMap:
        numbers, n_offsets = counts.tolist(), counts.shape[0]
        lists = []
        for v in range(n_offsets):
            if subm and v == n_offsets // 2:
                every = torch.arange(n_in, device=pairs.device)
                lists.append((every, every))
                continue
            mirrored = subm and v > n_offsets // 2
            length = numbers[n_offsets - 1 - v] if mirrored else numbers[v]
            lists.append((pairs[0, v, :length], pairs[1, v, :length]))
        return from_pairs(lists, n_in, n_out)

    return _remember(pairs, ("pairs", n_in, n_out, subm), build)


def map_from_table(pair_fwd: torch.Tensor, n_in: int, n_out: int) -> KernelMap:
    """pair_fwd [V, M] (input row of every output row, -1 absent) -> kernel map."""

    def build() -> KernelMap:
        lists = []
        for column in pair_fwd:
            rows = (column[:n_out] >= 0).nonzero().squeeze(1)
            lists.append((column.index_select(0, rows), rows))
        return from_pairs(lists, n_in, n_out)

    return _remember(pair_fwd, ("table", n_in, n_out), build)


def build_map(
    indices: torch.Tensor, batch_size: int, spatial_shape: Any, ksize: Any, stride: Any,
    padding: Any, dilation: Any, out_padding: Any, subm: bool, transpose: bool,
) -> tuple[torch.Tensor, KernelMap]:  # fmt: skip
    """(output indices [M, 1 + nd] int32, kernel map) of one layer geometry."""
    shape = [int(size) for size in spatial_shape]
    box = Box.grid(int(batch_size), shape)
    kernel, steps = tuple(ksize), tuple(dilation)
    if subm:
        offsets = geometry.submanifold_offsets(kernel, steps)
        return maps.submanifold_map(indices, box, offsets)[:2]
    if transpose:
        out = geometry.deconv_output_size(shape, ksize, stride, padding, dilation, out_padding)
    else:
        out = geometry.conv_output_size(shape, ksize, stride, padding, dilation)
    geometry.check_output_size(out, "the layer", shape)
    build = maps.generative_map if transpose else maps.strided_map
    offsets = geometry.strided_offsets(kernel, steps, tuple(padding))
    return build(indices, box, offsets, tuple(stride), Box.grid(int(batch_size), out))[:2]


def _activation(act_type: Any) -> str | None:
    name = getattr(act_type, "name", "None_")
    return {"None_": None, "ReLU": "relu", "LeakyReLU": "leaky_relu", "Sigmoid": "sigmoid"}[name]


def _run(
    features: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: KernelMap,
    act_type: Any,
    act_alpha: float,
) -> torch.Tensor:
    check_parameters(features, filters, "the convolution")
    return conv(
        features, filters, bias, kmap, layout="ovi", activation=_activation(act_type),
        alpha=act_alpha, allow_tf32=allow_tf32(),
    )  # fmt: skip


def conv_by_pairs(
    features: torch.Tensor, filters: torch.Tensor, pairs: torch.Tensor, counts: torch.Tensor,
    n_out: int, inverse: bool = False, subm: bool = False, bias: torch.Tensor | None = None,
    act_alpha: float = 0.0, act_type: Any = None,
) -> torch.Tensor:  # fmt: skip
    """features [N, C], filters KRSC -> [n_out, K]; features, filters and bias get gradients."""
    n_in = int(features.shape[0])
    kmap = map_from_pairs(
        pairs, counts, n_out if inverse else n_in, n_in if inverse else n_out, subm
    )
    return _run(
        features, filters, bias, kmap.transposed() if inverse else kmap, act_type, act_alpha
    )


def conv_by_table(
    features: torch.Tensor, filters: torch.Tensor, pair_fwd: torch.Tensor, n_out: int,
    bias: torch.Tensor | None = None, act_alpha: float = 0.0, act_type: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The same from a forward table."""
    kmap = map_from_table(pair_fwd, int(features.shape[0]), n_out)
    return _run(features, filters, bias, kmap, act_type, act_alpha)


def conv_backward(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    features: torch.Tensor,
    filters: torch.Tensor,
    out_bp: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of features and filters through `forward`, for the output gradient `out_bp`."""
    with torch.enable_grad():
        leaves = features.detach().requires_grad_(), filters.detach().requires_grad_()
        return torch.autograd.grad(forward(*leaves), leaves, out_bp)


def max_pool(features: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """max(0, window)."""
    return core_pool.pool(features, kmap, "max", floor=0.0)


def avg_pool(features: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """Mean over the present inputs."""
    return core_pool.pool(features, kmap, "avg")


def counts_of(pair_fwd: torch.Tensor) -> torch.Tensor:
    """Present inputs of every output row, int32 [M]."""
    return (pair_fwd >= 0).sum(0, dtype=torch.int32)


def global_pool_rearrange(
    coords: torch.Tensor, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by batch item: int32 [batch_size, N], padded with -1, and counts int32 [batch_size]."""
    batch = coords[:, 0].long()
    valid = (batch >= 0) & (batch < batch_size)
    order = torch.sort(torch.where(valid, batch, batch_size), stable=True).indices
    counts = torch.bincount(batch[valid], minlength=batch_size)
    starts = counts.cumsum(0) - counts
    rows = torch.full((batch_size, coords.shape[0]), -1, dtype=torch.int32, device=coords.device)
    live = order[: int(counts.sum())]
    place = torch.arange(live.shape[0], device=coords.device) - starts[batch[live]]
    rows[batch[live], place] = live.int()
    return rows, counts.int()


def tables_of(kmap: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """(pair_fwd [V, M], pair_bwd [V, N]) of a map."""
    return dense_table(kmap, 0), dense_table(kmap, 1)
