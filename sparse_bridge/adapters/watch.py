"""Which layers of a model can be one operation: seen in a call that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import hooks
from ..core.conv import fused_call
from . import fusion
from .fused_layers import Fused
from .protocol import features_of, is_layer, of

# Features by memory and by how often they had been overwritten.
_Features = tuple[int, int]
_SUMS = ("add", "__add__", "__radd__")
_SUMS_INTO = ("add_", "__iadd__")


class _Watch(TorchFunctionMode):
    """Who produced which features, which leaf modules took them, and what they were added to."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []  # ids name tensors only while those live
        self.overwritten: dict[int, int] = {}
        self.source: dict[_Features, nn.Module] = {}
        self.takers: dict[_Features, list[nn.Module]] = {}
        self.outputs: dict[nn.Module, list[_Features]] = {}
        self.inputs: dict[nn.Module, list[_Features]] = {}
        self.sums: dict[_Features, list[_Features]] = {}

    def _named(self, rows: torch.Tensor, written: int = 0) -> _Features:
        """written: how often it is now, besides what is known."""
        self.alive.append(rows)
        times = self.overwritten[id(rows)] = self.overwritten.get(id(rows), 0) + written
        return id(rows), times

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook: `module` takes features."""
        for value in args:
            rows = features_of(value)
            if rows is not None:
                name = self._named(rows)
                self.inputs.setdefault(module, []).append(name)
                self.takers.setdefault(name, []).append(module)

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """A hook: `module` returns features, perhaps those that it was given."""
        rows = features_of(out)
        if rows is not None:
            name = self._named(rows, int(any(rows is features_of(value) for value in args)))
            self.source.setdefault(name, module)
            self.outputs.setdefault(module, []).append(name)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        into = name in _SUMS_INTO
        if not (into or name in _SUMS) or len(args) != 2 or kwargs:
            return func(*args, **(kwargs or {}))
        both = [self._named(one) for one in args if isinstance(one, torch.Tensor)]
        out = func(*args)
        if isinstance(out, torch.Tensor):
            found = self._named(out, int(into))
            for one in both:
                self.sums.setdefault(one, []).append(found)
        return out

    def taker(self, outputs: Iterable[_Features]) -> nn.Module | None:
        """The one module that takes each of them, once, where nothing is added to them."""
        names = list(outputs)
        takers = [self.takers.get(name, []) for name in names]
        found = {id(one): one for several in takers for one in several}
        once = all(len(several) == 1 for several in takers) and self.sums.keys().isdisjoint(names)
        return next(iter(found.values())) if once and len(found) == 1 else None

    def summed(self, outputs: Iterable[_Features]) -> list[_Features]:
        """What becomes of features which nothing takes and to each of which others are added, once;
        [] if that is not so."""
        found: list[_Features] = []
        for name in outputs:
            sums = self.sums.get(name, ())
            if len(sums) != 1 or name in self.takers:
                return []
            found += sums
        return found


def watched(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Fused], Any]:
    """(what can be fused, output) of one call."""
    watch, handles = _Watch(), []
    for module in model.modules():
        if next(module.children(), None) is None and hooks.plain(module):
            handles.append(module.register_forward_pre_hook(watch.before))
            handles.append(module.register_forward_hook(watch.after))
    try:
        with fused_call.collect() as results, watch:
            out = forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    made = {id(result) for result in results}
    convolutions = [
        module
        for module, outputs in watch.outputs.items()
        if is_layer(module) and made.issuperset(i for i, _ in outputs)
    ]
    return list(_found(watch, convolutions, _contained(model))), out


def _contained(model: nn.Module) -> set[nn.Module]:
    """Convolutions that a container of their framework fuses by itself, more cheaply."""
    return {
        module
        for container in model.modules()
        if (protocol := of(container)) is not None
        for module in protocol.fused_inside(container)
    }


def _found(watch: _Watch, convolutions: list[nn.Module], contained: set[nn.Module]) -> Iterator[Fused]:
    known = set(convolutions)
    for module in convolutions:
        results = watch.outputs[module]
        norm = watch.taker(results)
        if not isinstance(norm, nn.BatchNorm1d) or not is_layer(norm, nn.BatchNorm1d):
            norm = None
        if norm is not None:
            folds = all(watch.source.get(name) in known for name in watch.inputs[norm])
            if not folds or not fusion.foldable(norm):
                continue
            results = watch.outputs[norm]
        sums = watch.summed(results)
        if module in contained and not sums:
            continue
        following = watch.taker(sums or results)
        if following is not None and fusion.activation_of(following) is None:
            following = None
        if norm is not None or sums or following is not None:
            yield Fused(module, norm, following, bool(sums))
