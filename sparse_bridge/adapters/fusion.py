"""Fused layers: normalisation and activation in the convolution's own store, or in one operation.

In eval mode a BatchNorm is a multiplication and an addition per channel. Behind a convolution both,
and an activation, cost nothing: the kernel applies them to its fp32 sums. In training a BatchNorm
and a ReLU behind it are one operation with one gradient. That happens only where nobody could
notice but by the clock: no hooks, no overridden `forward`; in inference also no gradients, and
running statistics in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad

from .. import hooks
from ..core.conv.epilogue import ACTIVATIONS, Activation, Epilogue, Norm
from ..core.maps.rows import in_scope
from ..core.ops.batch_norm import batch_norm_training, serves
from .protocol import is_layer

__all__ = [
    "EpilogueLayers",
    "activation_of",
    "batch_norm_inference",
    "batch_norm_training",
    "epilogue_after",
    "foldable",
    "foldable_values",
    "fusible_norm",
    "is_training_norm",
    "own_activation",
    "runs_own",
    "traced_norm",
    "training_fusible",
    "training_norm_after",
    "values_of",
]

_BY_MODULE: dict[type, tuple[Activation, Any]] = {row.module: (row, row.module.forward) for row in ACTIVATIONS.values()}


class EpilogueLayers(NamedTuple):
    """Layers behind a convolution that its epilogue may apply: a BatchNorm, then perhaps an
    activation."""

    norm: nn.BatchNorm1d
    activation: str | None = None
    alpha: float = 0.0

    def epilogue(self, bias: torch.Tensor | None) -> Epilogue:
        """Behind a convolution with this bias, with the norm's present statistics."""
        return Epilogue(bias, self.activation, self.alpha, values_of(self.norm))

    def length(self) -> int:
        """How many layers these are."""
        return 1 if self.activation is None else 2


def values_of(norm: nn.BatchNorm1d) -> Norm:
    """The present statistics and parameters of a foldable norm. (Attributes of a module are looked
    up five times slower than its dictionaries.)"""
    buffers: dict[str, Any] = norm._buffers
    parameters = norm._parameters
    return Norm(buffers["running_mean"], buffers["running_var"], parameters["weight"], parameters["bias"], norm.eps)


def foldable_values(norm: nn.BatchNorm1d, run: Any) -> Norm | None:
    """`values_of` a norm in eval mode that normalises by them and that nothing watches; `run` as of
    `is_training_norm`."""
    parameters: dict[str, Any] = norm._parameters
    buffers: dict[str, Any] = norm._buffers
    mean, var = buffers.get("running_mean"), buffers.get("running_var")
    if norm.training or len(parameters) != 2 or mean is None or var is None:
        return None
    if not runs_own(run, nn.BatchNorm1d, hooks.NORM_FORWARD):
        return None
    return Norm(mean, var, parameters["weight"], parameters["bias"], norm.eps)


def foldable(norm: nn.Module) -> bool:
    """A BatchNorm1d that only scales and shifts: eval mode, running statistics, no hooks."""
    if not isinstance(norm, nn.BatchNorm1d) or norm.training:
        return False
    mean = norm._buffers.get("running_mean")
    return mean is not None and mean.dtype != torch.float64 and hooks.plain(norm)


def activation_of(module: nn.Module) -> tuple[str, float] | None:
    """(name, slope) of an activation that kernels apply, torch's own or a framework's; or None."""
    for activation_class, (row, _) in _BY_MODULE.items():
        if is_layer(module, activation_class):
            return row.name, row.slope_of(module)
    return None


def own_activation(module: nn.Module) -> tuple[str, float] | None:
    """`activation_of` where it is torch's own, which nothing watches or replaces."""
    module_class: Any = type(module)
    entry = _BY_MODULE.get(module_class)
    if entry is None or not runs_own(module, module_class, entry[1]):
        return None
    return entry[0].name, entry[0].slope_of(module)


def epilogue_after(modules: Sequence[nn.Module], index: int) -> EpilogueLayers | None:
    """The layers from `modules[index]` on, if torch's own BatchNorm1d in eval mode is there."""
    if index >= len(modules):
        return None
    norm = modules[index]
    if type(norm) is not nn.BatchNorm1d or nn.BatchNorm1d.forward is not hooks.NORM_FORWARD or not foldable(norm):
        return None
    following = own_activation(modules[index + 1]) if index + 1 < len(modules) else None
    return EpilogueLayers(norm, *(following or ()))


def training_fusible(x: torch.Tensor) -> bool:
    """Whether layers that normalise features `x` in training may be one operation now: kernels
    there, and nobody who watches every module or every operation. In a capture they always are:
    torch's norm knows nothing of rows that are not in use."""
    if type(x) is not torch.Tensor:
        return False
    return in_scope() or not (
        hooks.traced()
        or serves(x) is None
        or hooks.hooked_everywhere()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


def fusible_norm(modules: Sequence[nn.Module], index: int, x: torch.Tensor) -> int:
    """How many modules from `modules[index]` on `batch_norm_training` may replace: 2 for torch's
    own BatchNorm1d in training and a ReLU, 1 for the norm alone, else 0."""
    norm = modules[index]
    if hooks.traced() or not (_is_own_training_norm(norm) and training_fusible(x)):
        return 0
    following = modules[index + 1] if index + 1 < len(modules) else None
    return 2 if runs_own(following, nn.ReLU, hooks.RELU_FORWARD) else 1


def traced_norm(modules: Sequence[nn.Module], index: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What `modules[index]` makes of features in a graph, with a ReLU behind it if both are one
    operator, and how many modules that were."""
    from ..core.compile import norms

    norm = modules[index]
    own = type(norm) is nn.BatchNorm1d and not hooks.hooked(norm)
    if not own or not norms.served(norm, x):
        return norm(x), 1
    following = modules[index + 1] if index + 1 < len(modules) else None
    relu = type(following) is nn.ReLU and not hooks.hooked(following)
    return norms.normalised(norm, x, relu), 1 + relu  # type: ignore[arg-type]


def is_training_norm(norm: nn.BatchNorm1d, run: Any) -> bool:
    """Whether `batch_norm_training` may replace `run`, which computes on the features: `norm`'s
    own forward of torch, or `norm` itself if it is no subclass and nothing watches it."""
    return (
        norm.training
        and len(norm._parameters) == 2  # none is an attribute of another kind
        and len(norm._buffers) == 3
        and runs_own(run, nn.BatchNorm1d, hooks.NORM_FORWARD)
    )


def runs_own(run: Any, module_class: type[nn.Module], forward: Any) -> bool:
    """Whether calling `run` is torch's own `forward` of a class and nothing else."""
    if not torch.compiler.is_compiling() and hooks.torch_replaced():
        return False
    if type(run) is MethodType:
        kind = type(run.__self__)  # a property would come before its parameters
        return run.__func__ is forward and not (hasattr(kind, "weight") or hasattr(kind, "bias"))
    return type(run) is module_class and module_class.forward is forward and hooks.unseen(run)


def _is_own_training_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.BatchNorm1d and is_training_norm(norm, norm)


def training_norm_after(modules: Sequence[nn.Module], index: int) -> tuple[torch.Tensor | None, ...] | None:
    """Weight, bias, running mean and variance and number of batches of the norm in training at
    `modules[index]`, if `batch_norm_training` may replace it."""
    norm = modules[index] if index < len(modules) else None
    if norm is None or not _is_own_training_norm(norm):
        return None
    state: dict[str, Any] = {**norm._parameters, **norm._buffers}
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return tuple([state[name] for name in names])


def batch_norm_inference(norm: nn.BatchNorm1d, run: Any, x: torch.Tensor) -> torch.Tensor:
    """What a BatchNorm1d in eval mode makes of x [N, C]; `run` as of `is_training_norm`.

    It comes to the same operation without looking up a dozen attributes of modules, which takes as
    long as the operation. Anything unusual goes to `run`.
    """
    if hooks.traced():
        traced: torch.Tensor = run(x)
        return traced
    parameters: dict[str, Any] = norm._parameters
    mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
    own = len(parameters) == 2 and x.ndim == 2 and mean is not None and var is not None
    if not own or not runs_own(run, nn.BatchNorm1d, hooks.NORM_FORWARD):
        y: torch.Tensor = run(x)
        return y
    return hooks.TORCHS_BATCH_NORM(
        x, parameters["weight"], parameters["bias"], mean, var, False, 0.0, norm.eps, torch.backends.cudnn.enabled
    )
