"""The functions of FlexGEMM's compiled extension that its users import, over the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....core.ops.serialize import decode, encode
from ....core.ops.voxel import devoxelize
from ....core.traced import between_graphs
from ....errors import UnsupportedError
from ..arguments import INTEGERS, Ints, check_features, check_tensors, per_axis, shape_entries
from ..caches import NeighborCache, SubMConv3dNeighborCache, written_out
from ..errors import ArgumentShapeError, ArgumentValueError
from ..geometry import Strided, check_coords
from ..grid_sample import check_points
from ..maps import output_coordinates, strided_cache, submanifold_cache
from ..sampling import corner_rows
from .hash_table import hashmap_insert_3d_idx_as_val


def refused(name: str) -> Callable[..., Any]:
    """A function that says that FlexGEMM's kernel `name` has no counterpart."""

    def kernel(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"flex_gemm.kernels.triton.{name} works on internals of FlexGEMM's dataflows; call "
            "flex_gemm.ops.spconv.sparse_submanifold_conv3d or sparse_conv3d."
        )

    kernel.__name__ = name
    return kernel


def _numbers(caller: str, values: tuple[int, ...], count: int) -> Ints:
    return shape_entries(values, count, f"{count} integers", f"what follows the tensors of {caller}")


def _items(coords: torch.Tensor) -> int:
    return int(coords[:, 0].max()) + 1 if len(coords) else 0


@between_graphs
def hashmap_build_submanifold_conv_neighbour_map(
    keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, *sizes: int
) -> torch.Tensor:
    """uint32 [N, V]; the coordinates are entered into the table.  sizes: S1..3, k1..3, d1..3."""
    numbers = _numbers("hashmap_build_submanifold_conv_neighbour_map", sizes, 9)
    hashmap_insert_3d_idx_as_val(keys, vals, coords, *numbers[:3])
    shape = (_items(coords), 1, *numbers[:3])
    layer: Any = numbers[3:6], numbers[6:9]
    table: torch.Tensor = submanifold_cache(coords, shape, *layer).neighbor_map
    return table


@between_graphs
def hashmap_build_sparse_conv_out_coords(coords: torch.Tensor, ratio: float, mode: int, *sizes: int) -> torch.Tensor:
    """Output coordinates int32 [M, 4].  sizes: B, S1..3, k1..3, s1..3, p1..3, d1..3."""
    if mode not in (0, 1, 2):
        raise ArgumentValueError(f"the row order is {mode!r}; expected 0, 1 or 2.")
    shape, layer = _strided("hashmap_build_sparse_conv_out_coords", sizes)
    return output_coordinates(coords, shape, layer, mode)


def expand_unique_build_sparse_conv_out_coords(coords: torch.Tensor, mode: int, *sizes: int) -> torch.Tensor:
    """The same rows in the same order."""
    return hashmap_build_sparse_conv_out_coords(coords, 1.0, mode, *sizes)


def _strided(caller: str, values: tuple[int, ...]) -> tuple[Ints, Strided]:
    """(five-entry shape, layer) of B, S1..3, k1..3, s1..3, p1..3, d1..3."""
    numbers = _numbers(caller, values, 16)
    parts = [numbers[first : first + 3] for first in (4, 7, 10, 13)]
    return (numbers[0], 1, *numbers[1:4]), Strided.of(*parts)


@between_graphs
def hashmap_build_sparse_conv_neighbour_map(
    coords: torch.Tensor, out_coords: torch.Tensor, ratio: float, with_bwd: bool, *sizes: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(uint32 [M, V], uint32 [N, V] or None).  sizes: B, S1..3, k1..3, s1..3, p1..3, d1..3."""
    shape, layer = _strided("hashmap_build_sparse_conv_neighbour_map", sizes)
    cache = strided_cache(coords, out_coords, shape, layer, with_bwd)
    return cache.neighbor_map, cache.neighbor_map_bwd


@between_graphs
def hashmap_build_grid_sample_3d_nearest_neighbor_map(
    keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, *extents: int
) -> torch.Tensor:
    """uint32 [B, L]; the coordinates are entered into the table."""
    check_points("hashmap_build_grid_sample_3d_nearest_neighbor_map", grid)
    hashmap_insert_3d_idx_as_val(keys, vals, coords, *extents)
    rows, _ = corner_rows(coords, (max(_items(coords), len(grid)), *extents), grid, "nearest")
    return written_out(rows.t()).view(*grid.shape[:2])


@between_graphs
def hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
    keys: torch.Tensor, vals: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, *extents: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint32 [B, L, 8], weights fp32 [B, L, 8]); the coordinates are entered into the table."""
    check_points("hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight", grid)
    hashmap_insert_3d_idx_as_val(keys, vals, coords, *extents)
    items = max(_items(coords), len(grid))
    rows, weights = corner_rows(coords, (items, *extents), grid, "trilinear")
    shape = (*grid.shape[:2], 8)
    return written_out(rows.t()).view(shape), weights.view(shape)


@between_graphs
def neighbor_map_post_process_for_masked_implicit_gemm_1(neighbor_map: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(masks, their order, input rows, output rows and starts of all pairs)."""
    cache = SubMConv3dNeighborCache(neighbor_map=neighbor_map)
    return (cache.gray_code, cache.sorted_idx, cache.valid_signal_i, cache.valid_signal_o, cache.valid_signal_seg)


@between_graphs
def neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(
    neighbor_map: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masks, their order)."""
    cache = SubMConv3dNeighborCache(neighbor_map=neighbor_map)
    return cache.gray_code, cache.sorted_idx


@between_graphs
def neighbor_map_post_process_for_masked_implicit_gemm_2(
    gray_code: torch.Tensor, sorted_idx: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(live offsets of each block of sorted rows, where each block starts)."""
    check_tensors("the block lists", gray_code=gray_code, sorted_idx=sorted_idx)
    (block_size,) = per_axis(block_size, 1, "block_size", 1)
    bits = torch.arange(32, device=gray_code.device)
    present = gray_code.long().unsqueeze(1) >> bits & 1
    table = torch.where(present > 0, 0, -1).int()
    cache = NeighborCache(neighbor_map=table, sorted_idx=sorted_idx)
    return cache.valid_kernel_callback(block_size), cache.valid_kernel_seg_callback(block_size)


@between_graphs
def indice_weighed_sum_fwd(input: torch.Tensor, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """out[m] = sum over k of weight[m, k] * input[indices[m, k]]; indices [M, K], any integers."""
    check_features("indice_weighed_sum_fwd", input)
    check_features("indice_weighed_sum_fwd", weight)
    check_tensors("indice_weighed_sum_fwd", indices=indices)
    rows = indices.view(torch.int32) if indices.dtype == torch.uint32 else indices
    return devoxelize(input, rows, weight)


@between_graphs
def indice_weighed_sum_bwd_input(
    grad_output: torch.Tensor, indices: torch.Tensor, weight: torch.Tensor, N: int
) -> torch.Tensor:
    """The gradient of `indice_weighed_sum_fwd`'s input, [N, C]."""
    leaf = grad_output.new_zeros((N, grad_output.shape[1]), requires_grad=True)
    with torch.enable_grad():
        y = indice_weighed_sum_fwd(leaf, indices, weight)
    return torch.autograd.grad(y, leaf, grad_output)[0]


def _check_bits(bits: int) -> None:
    if per_axis(bits, 1, "bits", 0)[0] > 21:
        raise ArgumentValueError(f"bits is {bits}; codes of 64 bits hold at most 21 per axis.")


def _encode(curve: str) -> Callable[..., None]:
    def code(coords: torch.Tensor, bits: int, codes: torch.Tensor) -> None:
        """Codes of int32 coordinates [N, 4], written into `codes` [N]."""
        check_coords(coords, f"{curve}_encode")
        check_tensors(f"{curve}_encode", codes=codes)
        if codes.dtype not in INTEGERS or codes.shape != coords.shape[:1]:
            raise ArgumentShapeError(
                f"{curve}_encode got codes {list(codes.shape)} of {codes.dtype} for coordinates "
                f"{list(coords.shape)}; expected [N], int32 or int64."
            )
        _check_bits(bits)
        codes.copy_(encode(coords, bits, curve, codes.dtype))

    return code


def _decode(curve: str) -> Callable[..., torch.Tensor]:
    def coords(codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Coordinates int32 [N, 4] of codes [N]."""
        check_tensors(f"{curve}_decode", codes=codes)
        if codes.ndim != 1 or codes.dtype not in INTEGERS:
            raise ArgumentShapeError(
                f"{curve}_decode got codes {list(codes.shape)} of {codes.dtype}; expected [N], int32 or int64."
            )
        _check_bits(bits)
        return decode(codes, bits, curve)

    return coords


z_order_encode, hilbert_encode = _encode("z_order"), _encode("hilbert")
z_order_decode, hilbert_decode = _decode("z_order"), _decode("hilbert")
