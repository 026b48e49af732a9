"""Pools, copies, sums and dense grids as operators.

Each has an operator for its gradient. That of a linear function is the transposed function; others
compute the result again and take the engine's own gradient of it: that is cheap beside a
convolution, and needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CoordinateError
from ..maps.segments import RowOperator
from ..ops import dense, pool, spread, voxel
from ..ops.max_rows import window_max
from ..ops.pool import pool_pairs
from ..ops.row_matrix import RowMatrix
from . import handles
from .library import define, differentiate, forget, recording
from .products import map_of

ops: Any = torch.ops.sparse_bridge


def row_function(name: str, more: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Operators `name`(x, more) and `name`_backward(dy, x, more) of a function that is
    differentiable in its first argument."""

    def forward(x: torch.Tensor, *constants: Any) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = run(x, *constants)
        return y.contiguous()

    def gradient(dy: torch.Tensor, x: torch.Tensor, *constants: Any) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with recording():
            (dx,) = torch.autograd.grad(run(x, *constants), x, dy)
        return dx.contiguous()

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, *constants = inputs
        ctx.tensors = [isinstance(value, torch.Tensor) for value in constants]
        ctx.constants = [None if is_tensor else value for is_tensor, value in zip(ctx.tensors, constants, strict=True)]
        ctx.save_for_backward(x, *[value for value in constants if isinstance(value, torch.Tensor)])

    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        tensors = iter(saved)
        constants = [
            next(tensors) if is_tensor else value for is_tensor, value in zip(ctx.tensors, ctx.constants, strict=True)
        ]
        dx = getattr(ops, f"{name}_backward")(dy, x, *constants)
        return dx, *(None,) * len(constants)

    define(name, f"(Tensor x, {more}) -> Tensor", forward, fake)
    define(
        f"{name}_backward",
        f"(Tensor dy, Tensor x, {more}) -> Tensor",
        gradient,
        lambda dy, x, *constants: x.new_empty(x.shape),
    )
    differentiate(name, setup, backward)
    differentiate(f"{name}_backward", forget, None)


def _linear(
    name: str,
    more: str,
    run: Callable[..., torch.Tensor],
    matrix: Callable[..., RowOperator],
    n_rows: Callable[..., int],
) -> None:
    """Operators of a function that is linear in its rows: the gradient is the transpose.

    matrix(n_in, *rest): of run(x, *rest) over n_in rows.  n_rows(*rest): of its result.
    """

    def forward(x: torch.Tensor, *constants: Any) -> torch.Tensor:
        with torch.no_grad():
            return run(x, *constants).contiguous()

    def gradient(dy: torch.Tensor, n_in: int, *constants: Any) -> torch.Tensor:
        return matrix(n_in, *constants).transposed().product(dy.contiguous()).contiguous()

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, *constants = inputs
        ctx.n_in = x.shape[0]
        ctx.tensors = [isinstance(value, torch.Tensor) for value in constants]
        ctx.constants = [None if is_tensor else value for is_tensor, value in zip(ctx.tensors, constants, strict=True)]
        ctx.save_for_backward(*[value for value in constants if isinstance(value, torch.Tensor)])

    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        pairs = zip(ctx.tensors, ctx.constants, strict=True)
        constants = [next(tensors) if is_tensor else value for is_tensor, value in pairs]
        dx = getattr(ops, f"{name}_backward")(dy, ctx.n_in, *constants)
        return dx, *(None,) * len(constants)

    define(
        name,
        f"(Tensor x, {more}) -> Tensor",
        forward,
        lambda x, *constants: x.new_empty((n_rows(*constants), x.shape[1])),
    )
    define(
        f"{name}_backward",
        f"(Tensor dy, SymInt n_in, {more}) -> Tensor",
        gradient,
        lambda dy, n_in, *constants: dy.new_empty((n_in, dy.shape[1])),
    )
    differentiate(name, setup, backward)
    differentiate(f"{name}_backward", forget, None)


def _pool(x: torch.Tensor, rows: int, kmap: torch.Tensor, mode: str, floor: float, transposed: bool) -> torch.Tensor:
    if mode == "first max":
        return window_max(x, map_of(kmap, transposed))
    return pool.pool(x, map_of(kmap, transposed), mode, floor=floor)


def _global_pool(x: torch.Tensor, items: torch.Tensor, n_items: int, mode: str) -> torch.Tensor:
    return pool.global_pool(x, items, n_items, mode)


def _to_dense(
    x: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    channels_first: bool,
    last_wins: bool,
    then: int,
    now: int,
) -> torch.Tensor:
    if then != now:
        _check_inside(coords, shape, not last_wins)
    return dense.to_dense(x, coords, shape, channels_first=channels_first, last_wins=last_wins)


def _check_inside(coords: torch.Tensor, shape: Sequence[int], negative: bool) -> None:
    wrong = dense.first_outside(coords, shape, negative=negative)
    if wrong is not None:
        name = "batch index" if wrong.column == 0 else f"axis {wrong.column - 1}"
        raise CoordinateError(
            f"row {wrong.row} has {name} {int(coords[wrong.row, wrong.column])}, but the grid "
            f"holds {shape[wrong.column]} ({wrong.n_outside} such entries); correct the "
            "coordinates or the grid first."
        )


def _fake_dense(
    x: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    channels_first: bool,
    last_wins: bool,
    then: int,
    now: int,
) -> torch.Tensor:
    batch, *axes = shape
    return x.new_empty((batch, x.shape[1], *axes) if channels_first else (*shape, x.shape[1]))


row_function(
    "pool",
    "SymInt rows, Tensor kmap, str mode, float floor, bool transposed",
    _pool,
    lambda x, rows, *args: x.new_empty((rows, x.shape[1])),
)
row_function(
    "global_pool",
    "Tensor items, SymInt n_items, str mode",
    _global_pool,
    lambda x, items, n_items, mode: x.new_empty((n_items, x.shape[1])),
)
row_function(
    "to_dense",
    "Tensor coords, SymInt[] shape, bool channels_first, bool last_wins, SymInt then, SymInt now",
    _to_dense,
    _fake_dense,
)
row_function(
    "row_product",
    "SymInt rows, Tensor matrix, str mode",
    lambda x, rows, matrix, mode: pool_pairs(x, handles.value_of(matrix, RowMatrix), mode),
    lambda x, rows, *args: x.new_empty((rows, x.shape[1])),
)
_linear(
    "spread",
    "Tensor items",
    spread.spread,
    lambda n_in, items: spread.spread_operator(items, n_in),
    lambda items: items.shape[0],
)
_linear(
    "voxelize",
    "Tensor index, Tensor counts",
    voxel.voxelize,
    lambda n_in, index, counts: voxel.means(index, counts),
    lambda index, counts: counts.shape[0],
)
_linear(
    "devoxelize",
    "Tensor index, Tensor weights",
    voxel.devoxelize,
    lambda n_in, index, weights: voxel.interpolation(index, weights, n_in),
    lambda index, weights: index.shape[0],
)
