"""`optimize(model)`: what a program asks for one model: graphs, tuned dataflows, and the calls after
which layers know what follows them."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from . import hooks, settings
from .adapters import base, protocol
from .errors import require_type
from .hooks import ModelReference

_MARK = "_sparse_bridge_optimized"
_EXAMPLES = 3  # calls until layers are launched together with what follows them
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that are optimised


def optimize(model: nn.Module, *example: Any, graphs: bool | None = None, **keywords: Any) -> nn.Module:
    """Prepare `model`, in place.

    It works on models of any shape and framework. In inference without gradients, BatchNorm, sums
    of residual blocks and activations behind sparse convolutions are applied by their kernels in
    every model; a layer knows after two calls what follows it. With `example`, a model in eval mode
    without `graphs` is called with it three times at once, so that the first scene of a program is
    served as the later ones; others are called once. (In `torch.inference_mode` only containers
    fuse: torch counts no changes there.)
    Parameters, buffers and checkpoints stay as they are.

    graphs: False: never replay this model or a part of it from captured graphs.  None: as the process does, see
    `enable(optimize=...)`.  True: on a GPU, also capture inference and training steps as graphs of launches and replay
    them, which takes Python out of the way. For models that take one sparse tensor and return such
    tensors or their features, in any structure of lists and dicts; other calls run as ever. Tensors
    beside it must not be computed with. One graph serves inputs of all sizes up to its own; a larger one
    makes another. It is captured at the fourth call, if nothing that the model does in Python could be missed in a
    replay, and if it computes the same over an input padded with rows that do not exist. Replays are compared with
    the layers now and then. Results have no kernel maps. In training loss and optimizer stay outside; a second
    forward pass before the first backward pass runs as ever.

    With SPARSE_BRIDGE_TUNE=full the first inference on a GPU, and the first training call if that
    comes before it, also choose the dataflows of layers that share a kernel map, by timing, which
    later maps then use: kernels are compiled for it, which takes seconds, and each group of layers
    is timed for 0.3 s at most.

    Returns `model`. Raises: DataTypeError for what is no module; ValueError when it is optimised already;
    UnsupportedError for `graphs` where this installation cannot capture.
    """
    require_type("optimize()", model, nn.Module, "a torch.nn.Module")
    if _MARK in model.__dict__:
        raise ValueError("this model is optimised already; call restore(model) first.")
    if not hooks.plain(model):
        raise ValueError("this model's forward is replaced or hooked; optimise it before.")
    training = None
    if graphs is False:
        hooks.forbid_replays(model)
    if graphs:
        training = base.capture("replay_training").TrainingReplayer(model, protocol.of)
    model.__dict__[_MARK] = True
    model.__dict__["forward"] = _FirstCalls(model, training)
    _models.add(model)
    if example or keywords:
        with torch.no_grad():
            for _ in range(1 if graphs or model.training else _EXAMPLES):
                model(*example, **keywords)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`; returns `model`. Raises: DataTypeError for what is no module."""
    require_type("restore()", model, nn.Module, "a torch.nn.Module")
    _models.discard(model)
    hooks.permit_replays(model)
    model.__dict__.pop(_MARK, None)
    if hooks.optimized(model):
        del model.__dict__["forward"]
    return model


def replays() -> list[tuple[str, int, int, str | None]]:
    """Those of them with `graphs`: class, calls that were replayed, graphs, and why there are no
    more."""
    rows = []
    for model in list(_models):
        forward = model.__dict__.get("forward")
        if isinstance(forward, _FirstCalls):
            modes = [forward.training]
        else:
            modes = [forward, getattr(forward, "training", None)]
        if hooks.optimized(model) and modes[-1] is not None:
            rows.append(base.capture("replay").summary_of(*modes))
    return rows


class _FirstCalls(ModelReference):
    """The model's forward until its first inference call."""

    in_place_of = None

    def __init__(self, model: nn.Module, training: Any) -> None:
        """training: takes calls with gradients where models are replayed from graphs; or None."""
        super().__init__(model)
        self.training, self.trained = training, False  # trained: whether a call of a training has been seen

    def _groups(self) -> contextlib.AbstractContextManager[None]:
        """Around a first call: tunes the layers that share maps, where tuning is asked for."""
        if self.trained or settings.get().tune != "full":
            return contextlib.nullcontext()
        from .core.tuning.ranks import one_of_several

        if one_of_several():
            return contextlib.nullcontext()
        self.trained = True
        from .tools import group_race

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
            out = forward(*args, **kwargs)
        self.model.__dict__.pop("forward", None)
        if self.training is not None:
            self.model.__dict__["forward"] = base.capture("replay").Replayer(self.training)
        return out
