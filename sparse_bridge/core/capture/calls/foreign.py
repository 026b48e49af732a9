"""Tensors from outside that a captured model would read: a graph knows nothing of the next ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ....refusals import Refusal, Why


class ForeignReads(TorchDispatchMode):
    """Raises Refusal where torch computes with tensors that were there before, but for some
    that are `known`.

    alters: whether it wrote to one of those, or drew random numbers.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.held, self.alters = known, False
        self._before = {one.untyped_storage()._cdata for one in known}
        # Weak ones, which keep addresses from being used again.
        self.known = {one.untyped_storage()._cdata: _weak(one) for one in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for one in _tensors((args, kwargs)):
            if one.untyped_storage()._cdata not in self.known and one.numel():
                raise Refusal(Why.GRAPH_FOREIGN_TENSOR, list(one.shape))
        self.alters = self.alters or self._altering(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        for one in _tensors(out):
            self.known.setdefault(one.untyped_storage()._cdata, _weak(one))
        return out

    def _altering(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return True
        if not func._schema.is_mutable:
            return False
        places = enumerate(func._schema.arguments)
        written = [
            args[n] if n < len(args) else kwargs.get(one.name)
            for n, one in places
            if one.alias_info is not None and one.alias_info.is_write
        ]
        return any(one.untyped_storage()._cdata in self._before for one in _tensors(written))

    def check(self, tensor: torch.Tensor) -> None:
        """Raise Refusal for an output tensor that was there before."""
        if tensor.untyped_storage()._cdata not in self.known and tensor.numel():
            raise Refusal(Why.GRAPH_RETURNS_FOREIGN, list(tensor.shape))


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
