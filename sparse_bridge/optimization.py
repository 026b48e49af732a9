"""`optimize(model)`: fused inference in models whose norms are not children of one container."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import hooks, log, settings
from .adapters import base, protocol
from .adapters.fused_layers import Fused, Skipped
from .adapters.protocol import features_of
from .adapters.watch import watched
from .errors import SparseBridgeError
from .refusals import Why

_MARK = "_sparse_bridge_optimized"
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that are optimised


def optimize(model: nn.Module, *example: Any, graphs: bool = False, **keywords: Any) -> nn.Module:
    """Fuse BatchNorm, sums of residual blocks and activations into the sparse convolutions of
    `model`, in place.

    It works on models of any shape and framework. The first inference call (eval mode, no
    gradients) watches which norm takes which convolution's features, what is added to them, and
    which activation follows; then the model runs once more, fused, and the fusion stays only if the
    outputs agree. With `example` that call is made at once.
    Parameters, buffers and checkpoints stay as they are, and so do training and calls with
    gradients. Later changes of the parameters count.

    The model must treat its layers alike in every call: whoever reads a convolution's features
    before the norm or activation in later calls alone gets them after it.

    graphs: on a GPU, also capture inference and training steps as graphs of launches and replay
    them, which takes Python out of the way. For models that take one sparse tensor and return such
    tensors or their features, in any structure of lists and dicts; other calls run as ever. Tensors
    beside it must not be computed with. A graph serves
    inputs of about one size, and is captured when the third of them comes, if the model computes
    the same over an input padded with rows that do not exist. Results have no kernel maps, and the
    memory of an inference stays taken for each of up to six sizes, that of a training step for each
    of up to three. In training loss and optimizer stay outside; a step goes backward once, and a
    second forward before it runs as ever. Modules must not be added or exchanged afterwards, nor
    their behaviour changed but by parameters, buffers, `train` and `requires_grad`.

    With SPARSE_BRIDGE_TUNE=full the first inference on a GPU, and the first training call if that
    comes before it, also choose the dataflows of layers that share a kernel map, by timing, which
    later maps then use: kernels are compiled for it, which takes seconds, and each group of layers
    is timed for 0.3 s at most.

    Returns `model`. Raises: ValueError when it is optimised already; UnsupportedError for `graphs`
    where this installation cannot capture.
    """
    if _MARK in model.__dict__:
        raise ValueError("this model is optimised already; call restore(model) first.")
    if not hooks.plain(model):
        raise ValueError("this model's forward is replaced or hooked; optimise it before.")
    own = functools.partial(type(model).forward, model)
    training = None
    if graphs:
        training = base.capture("replay_training").TrainingReplayer(model, own, protocol.of)
    model.__dict__[_MARK] = []
    model.__dict__["forward"] = _Learner(model, own, training)
    _models.add(model)
    if example or keywords:
        with torch.no_grad():
            model(*example, **keywords)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`; returns `model`."""
    _models.discard(model)
    for module in model.__dict__.pop(_MARK, ()):
        module.__dict__.pop("forward", None)
    if getattr(model.__dict__.get("forward"), "is_optimized_forward", False):
        del model.__dict__["forward"]
    return model


def fused() -> list[tuple[str, int]]:
    """The models that are optimised: class, and convolutions that apply what follows them."""
    return [
        (type(model).__name__, sum(isinstance(one.__dict__.get("forward"), Fused) for one in held))
        for model in list(_models)
        if (held := model.__dict__.get(_MARK)) is not None
    ]


def replays() -> list[tuple[str, int, int, str | None]]:
    """Those of them with `graphs`: class, calls that were replayed, graphs, and why there are no
    more."""
    found = []
    for model in list(_models):
        forward = model.__dict__.get("forward")
        if isinstance(forward, _Learner):
            modes = [forward.training]
        else:
            modes = [forward, getattr(forward, "training", None)]
        if getattr(forward, "is_optimized_forward", False) and modes[-1] is not None:
            found.append(base.capture("replay").summary_of(*modes))
    return found


@dataclasses.dataclass(eq=False)
class _Learner:
    """The model's forward until its first inference call."""

    model: nn.Module
    forward: Callable[..., Any]
    training: Any  # takes calls with gradients where models are replayed from graphs; or None
    trained: bool = False  # whether a call of a training has been seen
    is_optimized_forward = True

    def _groups(self) -> contextlib.AbstractContextManager[None]:
        """Around a first call: tunes the layers that share maps, where tuning is asked for."""
        if self.trained or settings.get().tune != "full":
            return contextlib.nullcontext()
        from .core.tuning.ranks import one_of_several

        if one_of_several():
            return contextlib.nullcontext()
        self.trained = True
        from .core.warmup import group_race

        return group_race.tuned()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if torch.is_grad_enabled() or self.model.training:
            replays = torch.is_grad_enabled() and self.training is not None
            taken = self.training if replays else forward
            with self._groups():
                return taken(*args, **kwargs)
        self.trained = False
        with self._groups():
            found, plain = watched(self.model, forward, args, kwargs)
        del self.model.__dict__["forward"]
        if self.training is not None:
            self.model.__dict__["forward"] = base.capture("replay").Replayer(self.training)
        for level in (2, 1, 0):
            _install(self.model, [one for fused in found if (one := fused.at(level))])
            if not found or self._agrees(plain, level, args, kwargs):
                return plain
            _uninstall(self.model)
        log.once(
            ("optimize", type(self.model).__name__),
            f"optimize() left {type(self.model).__name__} as it was: {Why.FUSION_OUTPUT.says()}; "
            f"{Why.FUSION_OUTPUT.remedy}.",
            level=30,
        )
        return plain

    def _agrees(self, plain: Any, level: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model computes `plain` as it is fused now."""
        try:
            return _agree(plain, self.forward(*args, **kwargs))
        except BaseException as error:
            expected = isinstance(error, RuntimeError) and not isinstance(
                error, (SparseBridgeError, torch.cuda.OutOfMemoryError)
            )
            if level == 2 and expected:  # an extension that asks for memory before the sum, say
                name = type(self.model).__name__
                reason = Why.FUSION_SUM.says(type(error).__name__, error)
                log.logger.warning("optimize() leaves the residual sums of %s unfused: %s", name, reason)
                return False
            _uninstall(self.model)
            raise


def _install(model: nn.Module, found: list[Fused]) -> None:
    touched = model.__dict__[_MARK]
    for fused in found:
        fused.module.__dict__["forward"] = fused
        skipped = fused.skipped()
        for module in skipped:
            module.__dict__["forward"] = Skipped(module)
        touched += [fused.module, *skipped]


def _uninstall(model: nn.Module) -> None:
    for module in model.__dict__[_MARK]:
        module.__dict__.pop("forward", None)
    model.__dict__[_MARK].clear()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    rows = features_of(value)
    if rows is not None:
        yield rows
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _agree(plain: Any, fused: Any) -> bool:
    """Whether two outputs have the same bits."""
    pairs = list(zip(_tensors(plain), _tensors(fused), strict=False))
    return bool(pairs) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
