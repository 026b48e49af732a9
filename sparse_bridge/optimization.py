"""`optimize(model)`: fused inference in models whose norms are not children of one container."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import log
from .adapters import fusion
from .adapters.spconv.replay import Replayer
from .adapters.spconv.replay_training import TrainingReplayer
from .core import fused_call

__all__ = ["optimize", "restore"]

_FRAMEWORKS = ("spconv", "torchsparse", "MinkowskiEngine")
_TAG = "_sparse_bridge_tail"
_MARK = "_sparse_bridge_optimized"
# Largest RMS error against the layers one by one, relative to the RMS of the output.
_LIMITS = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3, torch.float64: 1e-9}


def optimize(model: nn.Module, *example: Any, graphs: bool = False, **keywords: Any) -> nn.Module:
    """Fuse BatchNorm and activation into the sparse convolutions of `model`, in place.

    It works on models of any shape and framework. The first inference call (eval mode, no
    gradients) watches which norm takes which convolution's features; then the model runs once more,
    fused, and the fusion stays only if the outputs agree. With `example` that call is made at once.
    Parameters, buffers and checkpoints stay as they are, and so do training and calls with
    gradients. Later changes of the parameters count.

    The model must treat its layers alike in every call: whoever reads a convolution's features
    before the norm in later calls alone gets them after it.

    graphs: on a GPU, also capture inference and training steps as graphs of launches and replay
    them, which takes Python out of the way. For models that take one SparseConvTensor, alone, and
    return such tensors or their features, in any structure of lists and dicts; other calls run as
    ever. A graph serves scenes of about one size, and is captured when the third of them comes, if
    the model computes the same over a scene with rows that do not exist. Results have no kernel
    maps (`indice_dict`), and the memory of an inference stays taken for each of up to six sizes,
    that of a training step for each of up to three. In training loss and optimizer stay outside; a
    step goes backward once, and a second forward before it runs as ever. Modules must not be added
    or exchanged afterwards, nor their behaviour changed but by parameters, buffers, `train` and
    `requires_grad`.

    Returns `model`. Raises: ValueError when it is optimised already.
    """
    if _MARK in model.__dict__:
        raise ValueError("this model is optimised already; call restore(model) first.")
    if not fusion.plain(model):
        raise ValueError("this model's forward is replaced or hooked; optimise it before.")
    model.__dict__[_MARK] = []
    own = functools.partial(type(model).forward, model)
    model.__dict__["forward"] = _Learner(
        model, own, TrainingReplayer(model, own) if graphs else None
    )
    if example or keywords:
        with torch.no_grad():
            model(*example, **keywords)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`; returns `model`."""
    for module in model.__dict__.pop(_MARK, ()):
        module.__dict__.pop("forward", None)
    if isinstance(model.__dict__.get("forward"), (_Learner, Replayer)):
        del model.__dict__["forward"]
    return model


def _rows(value: Any) -> Any:
    """The features of a framework's tensor, or a tensor itself."""
    if isinstance(value, torch.Tensor):
        return value
    for name in ("features", "F", "feats"):
        found = getattr(value, name, None)
        if isinstance(found, torch.Tensor):
            return found
    return None


def _ours(module: nn.Module, torch_kind: type) -> bool:
    """torch's own class, or the subclass that a framework makes of it."""
    return type(module) is torch_kind or (
        isinstance(module, torch_kind) and type(module).__module__.startswith(_FRAMEWORKS)
    )


@dataclasses.dataclass(eq=False)
class _Fused:
    """The forward of a convolution that applies its norm and activation."""

    module: nn.Module
    norm: nn.BatchNorm1d
    following: nn.Module | None = None

    def __post_init__(self) -> None:
        kind = None if self.following is None else _activation(self.following)
        self.kind = kind or (None, 0.0)

    def _pending(self) -> fused_call.Pending:
        return fused_call.Pending(fusion.values_of(self.norm), *self.kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if torch.is_grad_enabled() or self.module.training or self.norm.training:
            return forward(self.module, *args, **kwargs)
        out, taken = fused_call.offer(self._pending(), forward, self.module, *args, **kwargs)
        if taken is not None:
            rows = _rows(out)
            if rows is not taken:
                raise RuntimeError(
                    f"{type(self.module).__name__} changed its features after the convolution "
                    "that optimize() fused a norm into; call sparse_bridge.restore(model)."
                )
            setattr(rows, _TAG, self)
        return out


@dataclasses.dataclass(eq=False)
class _Skipped:
    """The forward of a norm or activation that a convolution may have applied already."""

    module: nn.Module

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        done = getattr(_rows(value), _TAG, None)
        if done is not None and (done.norm is self.module or done.following is self.module):
            return value
        return type(self.module).forward(self.module, value, *args, **kwargs)


def _activation(module: nn.Module) -> tuple[str, float] | None:
    for kind, name in ((nn.ReLU, "relu"), (nn.LeakyReLU, "leaky_relu"), (nn.Sigmoid, "sigmoid")):
        if _ours(module, kind):
            return name, float(getattr(module, "negative_slope", 0.0))
    return None


@dataclasses.dataclass(eq=False)
class _Learner:
    """The model's forward until its first inference call."""

    model: nn.Module
    forward: Callable[..., Any]
    training: TrainingReplayer | None  # where models are replayed from graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if torch.is_grad_enabled() and self.training is not None:
            return self.training(*args, **kwargs)
        if torch.is_grad_enabled() or self.model.training:
            return forward(*args, **kwargs)
        pairs, plain = _watch(self.model, forward, args, kwargs)
        del self.model.__dict__["forward"]
        if self.training is not None:
            self.model.__dict__["forward"] = Replayer(self.model, forward, _agree, self.training)
        for activations in (True, False):
            _install(self.model, pairs, activations)
            if not pairs or _agree(plain, forward(*args, **kwargs)):
                return plain
            _uninstall(self.model)
        log.once(
            ("optimize", type(self.model).__name__),
            f"optimize() left {type(self.model).__name__} as it was: fused, its output differs. "
            "Somebody reads features between a convolution and its norm.",
            level=30,
        )
        return plain


def _install(model: nn.Module, pairs: list[_Fused], activations: bool) -> None:
    touched = model.__dict__[_MARK]
    for pair in pairs:
        following = pair.following if activations else None
        pair.module.__dict__["forward"] = _Fused(pair.module, pair.norm, following)
        pair.norm.__dict__["forward"] = _Skipped(pair.norm)
        touched += [pair.module, pair.norm]
        if following is not None:
            following.__dict__["forward"] = _Skipped(following)
            touched.append(following)


def _uninstall(model: nn.Module) -> None:
    for module in model.__dict__[_MARK]:
        module.__dict__.pop("forward", None)
    model.__dict__[_MARK].clear()


class _Watch:
    """Who produced which features, and which leaf modules took them."""

    def __init__(self) -> None:
        self.alive: list[Any] = []  # ids name tensors only while those live
        self.source: dict[int, nn.Module] = {}
        self.takers: dict[int, list[nn.Module]] = {}
        self.outputs: dict[nn.Module, list[int]] = {}
        self.inputs: dict[nn.Module, list[int]] = {}
        self.overwritten: set[int] = set()  # by layers that work in place

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for value in args:
            rows = _rows(value)
            if rows is not None:
                self.alive.append(rows)
                self.inputs.setdefault(module, []).append(id(rows))
                if id(rows) not in self.overwritten:
                    self.takers.setdefault(id(rows), []).append(module)

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        rows = _rows(out)
        if rows is not None:
            self.alive.append(rows)
            if any(rows is _rows(value) for value in args):
                self.overwritten.add(id(rows))
            self.source.setdefault(id(rows), module)
            self.outputs.setdefault(module, []).append(id(rows))

    def taker(self, module: nn.Module) -> nn.Module | None:
        """The one module that takes every output of `module`, each once."""
        takers = [self.takers.get(number, []) for number in self.outputs.get(module, ())]
        found = {id(one): one for several in takers for one in several}
        once = all(len(several) == 1 for several in takers)
        return next(iter(found.values())) if once and len(found) == 1 else None


def _watch(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Fused], Any]:
    """(fusible pairs, output) of one call."""
    watch, handles = _Watch(), []
    for module in model.modules():
        if next(module.children(), None) is None and fusion.plain(module):
            handles.append(module.register_forward_pre_hook(watch.before))
            handles.append(module.register_forward_hook(watch.after))
    try:
        with fused_call.collect() as results:
            out = forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    made = {id(result) for result in results}
    convolutions = [
        module for module, outputs in watch.outputs.items()
        if type(module).__module__.startswith(_FRAMEWORKS) and made.issuperset(outputs)
    ]  # fmt: skip
    return list(_pairs(watch, convolutions, _contained(model))), out


def _contained(model: nn.Module) -> set[nn.Module]:
    """Convolutions that a container of spconv's fuses by itself, more cheaply."""
    found: set[nn.Module] = set()
    for container in model.modules():
        if any(kind.__name__ == "SparseSequential" for kind in type(container).__mro__):
            children = list(container.children())
            found.update(a for a, b in itertools.pairwise(children) if type(b) is nn.BatchNorm1d)
    return found


def _pairs(
    watch: _Watch, convolutions: list[nn.Module], contained: set[nn.Module]
) -> Iterator[_Fused]:
    known = set(convolutions)
    for module in convolutions:
        norm = watch.taker(module)
        if module in contained:
            continue
        if norm is None or not _ours(norm, nn.BatchNorm1d) or not fusion.foldable(norm):
            continue
        assert isinstance(norm, nn.BatchNorm1d)
        if any(watch.source.get(number) not in known for number in watch.inputs[norm]):
            continue
        following = watch.taker(norm)
        if following is not None and _activation(following) is None:
            following = None
        yield _Fused(module, norm, following)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    rows = _rows(value)
    if rows is not None:
        yield rows
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _agree(plain: Any, fused: Any) -> bool:
    pairs = list(zip(_tensors(plain), _tensors(fused), strict=False))
    return bool(pairs) and all(_close(a, b) for a, b in pairs)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    error = (a.double() - b.double()).square().mean()
    return bool(error <= _LIMITS[a.dtype] ** 2 * a.double().square().mean() + 1e-30)
