"""`optimize(model)`: what a program asks for one model: graphs, tuned dataflows, and the calls after
which layers know what follows them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from . import hooks, settings
from .adapters import base, protocol
from .core import served_forward
from .core.served_forward import Server
from .errors import ModelError, SettingError, require_type
from .names import meant

_EXAMPLES = 3  # calls until layers are launched together with what follows them
# Models that are optimised, and what ends that.
_models: MutableMapping[nn.Module, list[Callable[[nn.Module], None]]] = WeakIdKeyDictionary()


def optimize(model: nn.Module, *example: Any, graphs: bool | None = None, **keywords: Any) -> nn.Module:
    """Prepare `model`, in place.

    It works on models of any shape and framework. In inference without gradients, BatchNorm, sums
    of residual blocks and activations behind sparse convolutions are applied by their kernels in
    every model; a layer knows after two calls what follows it. With `example`, a model in eval mode
    without `graphs` is called with it three times at once, so that layers fuse from the first
    scene of a program on; others are called once. (In `torch.inference_mode` only containers
    fuse: torch counts no changes there.)
    Parameters, buffers and checkpoints stay as they are. Copies and pickles of the model are not optimised.

    graphs: None: replay as the process does, by default on NVIDIA GPUs, see `enable(optimize=...)`.  False: never
    replay this model or a part of it from captured graphs.  True: replay this model, whatever the process does;
    `report()` says what is in the way, and the log warns of what lies in the model. On a GPU inference and training
    steps are captured as graphs of launches, which takes Python out of the way. That is for models that take one
    sparse tensor and return such tensors or their features, in any structure of lists and dicts; other calls are
    eager. Tensors beside it must not be computed with. One graph serves inputs of all sizes up to its own; a larger
    one makes another. It is captured at the eighth call of a kind, if nothing that the model does in Python could be
    missed in a replay, and if it computes the same over an input padded with rows that do not exist. Replays are
    compared with the layers now and then. Results have no kernel maps. In training loss and optimizer stay outside; a
    second forward pass before the first backward pass is eager.

    With SPARSE_BRIDGE_TUNE=full the first inference on a GPU, and the first training call if that
    comes before it, also choose the dataflows of layers that share a kernel map, by timing, which
    later maps then use: kernels are compiled for it, which takes seconds, and each group of layers
    is timed for 0.3 s at most.

    keywords: of the model, with `example` or alone.

    Returns `model`. Raises: DataTypeError for what is no module; SettingError for another `graphs`, and keywords
    that the model's forward does not name; ModelError, a ValueError, when it is optimised already, or its forward is
    hooked, replaced or compiled; UnsupportedError for `graphs` where this installation cannot capture, or where the
    forward of the model is no plain function of its class; what the model raises over `example`. A model is left as
    it was then.
    """
    require_type("optimize()", model, nn.Module, "a torch.nn.Module")
    if graphs not in (None, True, False):
        raise SettingError(f"graphs is {graphs!r}; expected True, False or None.")
    inputs = inspect.signature(model.forward).parameters if keywords else ()
    for name in keywords:
        hint = meant(name, ("graphs",))
        if name not in inputs and (hint or not example):
            raise SettingError(f"optimize() has no option {name!r}; expected graphs, or inputs of the model.{hint}")
    if model in _models:
        raise ModelError("this model is optimised already; call restore(model) first.")
    if not hooks.plain(model):
        raise ModelError("this model's forward is hooked, replaced or compiled; call optimize() before that.")
    if graphs is False:
        hooks.forbid_replays(model)
    ends: list[Callable[[nn.Module], None]] = []
    if graphs:
        regions = base.capture("graph_regions")
        regions.serve(model, protocol.of)
        ends.append(regions.end)
    if settings.get().tune == "full":
        ends.insert(0, _FirstCalls(model).end)
    _models[model] = ends
    if example or keywords:
        try:
            with torch.no_grad():
                for _ in range(1 if graphs or model.training else _EXAMPLES):
                    model(*example, **keywords)
        except BaseException:  # another example may do
            restore(model)
            raise
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`; returns `model`. Raises: DataTypeError for what is no module."""
    require_type("restore()", model, nn.Module, "a torch.nn.Module")
    hooks.permit_replays(model)
    for end in _models.pop(model, ()):
        end(model)
    return model


class _FirstCalls(Server):
    """Is called in place of a model's forward until its first inference: layers that share maps are tuned in that
    call, and in the first call of a training before it."""

    asked = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.trained = False  # whether a call of a training has been tuned

    def end(self, model: nn.Module) -> None:
        """Have what served the model before serve it again, or its own forward."""
        before, self.before = self.before, None
        self.uninstall()
        if before is not None and not before.over:
            served_forward.serve(before)

    def _groups(self) -> contextlib.AbstractContextManager[None]:
        """Around a call: tunes the layers that share maps, where that is due."""
        from .core.tuning.ranks import one_of_several

        if self.trained or one_of_several():
            return contextlib.nullcontext()
        self.trained = True
        from .tools import group_race

        return group_race.tuned()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inference = not (torch.is_grad_enabled() or self.model.training)
        self.trained = self.trained and not inference
        with self._groups():
            out = (self.before or self.run_layers)(*args, **kwargs)
        if inference:
            self.end(self.model)
        return out
