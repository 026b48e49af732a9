"""Values that kernels of torch may not be given: on a GPU they end the process, where a CPU raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....refusals import Refusal, Why
from .row_slices import assert_all_rows

_FROM_THE_END = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_unsafe_index", "take", "put_")}
_FLAT = ("aten::take", "aten::put_")
# Operators that take numbers from 0 to 1, and the argument that has them.
_SHARES = {"aten::binary_cross_entropy": "self", "aten::bernoulli": "self", "aten::bernoulli_": "p"}
_MASKS = (torch.bool, torch.uint8)


class IndexChecks(TorchDispatchMode):
    """Raises Refusal before an operator of torch reads or writes outside of a tensor, and where the program takes rows
    by their numbers. A trial has rows that do not exist, and what a model makes of them may be any index. Waits for the
    device at each such operator."""

    def __init__(self, capacities: Mapping[int, int], weights: Iterable[torch.Tensor]) -> None:
        """capacities: rows of the levels of the trial, see `assert_all_rows`.  weights: parameters and buffers, which
        have no rows, and may be as long as a level."""
        super().__init__()
        self._capacities = set(capacities.values())
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}

    def __torch_dispatch__(self, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = arguments_of(func, args, kwargs or {})
        assert_indices(func, given)
        own = given.get("self")
        if isinstance(own, torch.Tensor) and own.untyped_storage()._cdata not in self._weights:
            assert_all_rows(func._schema.name, own, given, self._capacities)
        return func(*args, **(kwargs or {}))


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of a call of an operator, by name; None for those that it is called without."""
    names = [argument.name for argument in func._schema.arguments]
    return {name: args[n] if n < len(args) else kwargs.get(name) for n, name in enumerate(names)}


def assert_indices(func: Any, given: dict[str, Any]) -> None:
    """Raise Refusal where an operator is given an index out of range, or a share that is none."""
    name = func._schema.name
    share = given.get(_SHARES.get(name, ""))
    if isinstance(share, torch.Tensor) and share.is_floating_point():
        _assert_within(share, 0.0, 1.0, name)
    own = given.get("weight" if name == "aten::embedding" else "self")
    if not isinstance(own, torch.Tensor):
        return
    for key, index in given.items():
        if not key.startswith(("index", "indic")):
            continue
        if isinstance(index, (list, tuple)):
            _assert_axes(own, index, name)
        elif name in _FLAT:
            _assert_index(index, own.numel(), name)
        elif own.ndim:
            axis = given.get("dim")
            _assert_index(index, own.shape[axis if isinstance(axis, int) else 0], name)
    target = given.get("target")
    if name.startswith("aten::nll_loss") and isinstance(target, torch.Tensor):
        _assert_index(target[target != given.get("ignore_index", -100)], own.shape[int(own.ndim > 1)], name)


def _assert_axes(own: torch.Tensor, index: Any, name: str) -> None:
    axis = 0
    for one in index:
        if isinstance(one, torch.Tensor) and one.dtype in _MASKS:
            axis += one.ndim
            continue
        _assert_index(one, own.shape[axis], name)
        axis += 1


def _assert_index(index: Any, size: int, name: str) -> None:
    if isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
        _assert_within(index, -size if name in _FROM_THE_END else 0, size - 1, name)


def _assert_within(values: torch.Tensor, low: float, high: float, name: str) -> None:
    if values.numel() and not bool(((values >= low) & (values <= high)).all()):
        raise Refusal(Why.GRAPH_INDEX, name)
