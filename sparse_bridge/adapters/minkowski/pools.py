"""Local and global pooling between the maps of a manager, on plain features."""

from __future__ import annotations

import torch

from ...core.ops.max_rows import list_max, window_max
from ...core.ops.pool import global_pool, pool
from ...core.ops.row_matrix import RowMatrix
from .layers import KernelSpec, check_features, output_key, transposed_key
from .registry import Key, MapRegistry
from .relations import batch_rows, parent_rows, relation

__all__ = ["cell_matrix", "global_pooling", "local_pooling", "pool_items", "transposed_pooling"]


def cell_matrix(registry: MapRegistry, in_key: Key, out_key: Key) -> RowMatrix:
    """Sums the rows of `in_key` into the cells of `out_key`; rows without a cell take no part."""
    found = registry.cells.get((in_key, out_key))
    if found is None:
        n_in, n_out = registry.grid(in_key).n_rows, registry.grid(out_key).n_rows
        device = registry.grid(in_key).coords.device
        if in_key == out_key:
            parents = torch.arange(n_in, device=device)
        else:
            parents = parent_rows(registry, in_key, out_key)
        rows = (parents >= 0).nonzero().squeeze(1)
        found = RowMatrix(parents.index_select(0, rows), rows, None, n_out, n_in)
        registry.cells[in_key, out_key] = found
    return found


def _mean(total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return total / counts.clamp(min=1).unsqueeze(1).to(total.dtype)


def local_pooling(
    registry: MapRegistry, features: torch.Tensor, mode: str, in_key: Key, given: Key | None,
    spec: KernelSpec, what: str = "local pooling",
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """Pool [N, C]: (features, key of the output). mode: "sum", "avg" (over present inputs), "max".

    A kernel equal to its stride bins every input into its cell; any other one is a window like a
    convolution's. Windows without input give 0. Raises: as `convolve.convolution`.
    """
    check_features(registry, in_key, features, what)
    out_key = output_key(registry, in_key, given, spec)
    if not spec.cells:
        kmap = relation(registry, in_key, out_key, spec.region)
        return (
            window_max(features, kmap) if mode == "max" else pool(features, kmap, mode)
        ), out_key
    matrix = cell_matrix(registry, in_key, out_key)
    if mode == "max":
        return list_max(features, matrix.in_rows, matrix.out_rows, matrix.n_out), out_key
    if mode == "avg":
        # Sums of half types may overflow where their mean does not.
        half = features.dtype in (torch.float16, torch.bfloat16)
        total = matrix.multiply(features.float() if half else features)
        return _mean(total, matrix.counts()).to(features.dtype), out_key
    return matrix.multiply(features), out_key


def transposed_pooling(
    registry: MapRegistry, features: torch.Tensor, in_key: Key, given: Key | None, spec: KernelSpec,
    average: bool = False,
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """Sum (or mean) of the contributing parents at every finer coordinate: (features, key)."""
    check_features(registry, in_key, features, "MinkowskiPoolingTranspose")
    out_key = transposed_key(registry, in_key, given, spec)
    if spec.cells:
        return cell_matrix(registry, out_key, in_key).transposed().multiply(features), out_key
    kmap = relation(registry, out_key, in_key, spec.region).transposed()
    return pool(features, kmap, "avg" if average else "sum"), out_key


def pool_items(features: torch.Tensor, rows: torch.Tensor, n_items: int, mode: str) -> torch.Tensor:
    """Reduce the rows of every item: [n_items, C]; an item without rows gives 0."""
    if n_items == 0:
        return features[:0].clone()
    return global_pool(features, rows, n_items, mode)


def global_pooling(
    registry: MapRegistry, features: torch.Tensor, mode: str, in_key: Key
) -> tuple[torch.Tensor, Key]:
    """Pool every batch item: rows by ascending batch index, and the key of the origin map."""
    check_features(registry, in_key, features, "global pooling")
    origin = registry.origin()
    rows = batch_rows(registry, in_key, origin)
    return pool_items(features, rows, registry.grid(origin).n_rows, mode), origin
