"""Tensors from outside that a captured model would read: a graph knows nothing of the next ones."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ....refusals import Refusal, Why
from ...geometry.constants import is_constant
from .index_checks import arguments_of, assert_indices
from .number_tensors import NumberTensors


class ForeignReads(TorchDispatchMode):
    """Raises Refusal where torch computes with tensors that were there before, but for some
    that are `known`.

    alters: whether it wrote to one of those, or drew random numbers.  random: the operator that drew some.  multiplies:
    whether one multiplied matrices.
    numbers: tensors that were sent for the model.  parameters: of the model, by name. Before it writes to one, Refusal
    is raised.
    """

    random: Any = None
    multiplies = False

    def __init__(
        self,
        allowed: list[torch.Tensor],
        numbers: NumberTensors | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.alters, self._keep_alive, self._numbers = False, allowed, numbers or NumberTensors()
        self._initial = {tensor.untyped_storage()._cdata for tensor in allowed}
        self._parameters = {p.untyped_storage()._cdata: name for name, p in (parameters or {}).items()}
        # Weak ones, which keep addresses from being used again.
        self.allowed = {tensor.untyped_storage()._cdata: _weak(tensor) for tensor in allowed}

    def __torch_dispatch__(self, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._assert_known((args, kwargs))
        if "c10d" in func.namespace:  # the other ranks make no trial at this moment
            raise Refusal(Why.GRAPH_RANKS, str(func))
        self.alters = self.alters or self._altering(func, args, kwargs or {})
        self.multiplies = self.multiplies or func._schema.name.endswith(("mm", "mm_", "mv", "dot", "bilinear"))
        assert_indices(func, arguments_of(func, args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.allowed.setdefault(tensor.untyped_storage()._cdata, _weak(tensor))
        return out

    def __exit__(self, kind: Any, error: Any, traceback: types.TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, Exception) and not isinstance(error, (Refusal, torch.OutOfMemoryError)):
            self._assert_known(_operands(traceback))  # functions of losses look at shapes before anything is computed

    def _assert_known(self, values: Any) -> None:
        for tensor in _tensors(values):
            foreign = tensor.untyped_storage()._cdata not in self.allowed and tensor.numel() > 0
            if foreign and not (is_constant(tensor) or self._numbers.holds(tensor)):
                raise Refusal(Why.GRAPH_FOREIGN_TENSOR, list(tensor.shape))

    def _altering(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = func
            return True
        if not func._schema.is_mutable:
            return False
        arguments = enumerate(func._schema.arguments)
        written = [
            args[n] if n < len(args) else kwargs.get(argument.name)
            for n, argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        storages = [tensor.untyped_storage()._cdata for tensor in _tensors(written)]
        for storage in storages:
            if storage in self._parameters:
                raise Refusal(Why.GRAPH_WRITES_STATE, self._parameters[storage], func)
        return not self._initial.isdisjoint(storages)

    def check(self, tensor: torch.Tensor) -> None:
        """Raise Refusal for an output tensor that was there before."""
        if tensor.untyped_storage()._cdata not in self.allowed and tensor.numel():
            raise Refusal(Why.GRAPH_RETURNS_FOREIGN, list(tensor.shape))


def _operands(traceback: types.TracebackType | None) -> list[Any]:
    """What the function of torch was given that raised an error; [] where another function did."""
    if traceback is None:
        return []
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    torchs = str(frame.f_globals.get("__name__")).startswith("torch.")
    return list(frame.f_locals.values()) if torchs else []


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
