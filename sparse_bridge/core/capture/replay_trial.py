"""A model over a padded input, forward and backward, and whether it computes the same.

Batch norms divide by the rows that there are. Whatever else mixes rows shows: outputs, gradients
and running statistics are compared with those of the input alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ... import tolerances
from ..conv.convolution import autocast_dtype
from ..ops.batch_norm import batch_norm
from . import padded
from .padded import PaddedInput, UnpaddedError
from .replay_parts import Tensors, over_padded, rebuilt

_TRIAL_FILL = 3.0  # behind the last row: finite, and far from what features are there
_ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


class PaddedModel:
    """The model over parameters that share memory with its own, but have no history.

    What autograd knows of the parameters themselves belongs to other streams.
    """

    def __init__(self, model: nn.Module, x: Any, tensors: Tensors) -> None:
        """model: called by itself.  x: a sparse tensor of the kind it will be given, read through
        `tensors`."""
        self.model, self.x, self.tensors = model, x, tensors
        features = tensors.features_of(x)
        assert features is not None
        self.features = features
        self.aliases = {
            name: parameter.detach().requires_grad_(parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        self.trained = {name: p for name, p in self.aliases.items() if p.requires_grad}
        # Not the model's own: their versions are of interest to backward passes still to come.
        self.buffers = {name: buffer.data for name, buffer in model.named_buffers()}

    def inputs(self, features: torch.Tensor) -> list[torch.Tensor]:
        """What gradients are wanted of."""
        return ([features] if features.requires_grad else []) + list(self.trained.values())

    def __call__(self, x: Any) -> Any:
        given = {**self.aliases, **self.buffers}
        held = dict(given)
        out = torch.func.functional_call(self.model, held, (x,))
        for name, one in given.items():  # torch tells in `held` what was put in their place
            if held[name] is not one:
                raise UnpaddedError(f"it puts another tensor in the place of {name}.")
        return out

    def over(self, scene: PaddedInput, features: torch.Tensor) -> Any:
        with _counted_norms(list(self.model.modules())):
            return over_padded(self, scene, features, self.x, self.tensors)

    def alone(self, nudge: float = 0.0) -> tuple[Any, torch.Tensor]:
        """(output over the scene as it is, its features). nudge: change those by about as much."""
        features = self.features.detach().clone()
        if nudge:
            features *= 1 + nudge * torch.randn_like(features)
        features.requires_grad_(self.features.requires_grad)
        coords = self.tensors.coordinates_of(self.x).detach()
        return self(self.tensors.with_rows(self.x, features, coords)), features

    def capacity(self, scene: PaddedInput) -> torch.Tensor:
        """Features for the padded scene, with those of x in place."""
        rows, channels = self.features.shape
        features = self.features.new_full((scene.coords.shape[0], channels), _TRIAL_FILL)
        features[:rows] = self.features.detach()
        return features.detach().requires_grad_(self.features.requires_grad)

    def try_out(self, scene: PaddedInput, rows: dict[int, int]) -> None:
        """Raise UnpaddedError unless outputs, gradients and buffers are those of x alone."""
        own = self.buffers
        try:
            self._begin(own)
            expected, features = self.alone()
            leaves = leaves_of(self.tensors, expected)
            cotangents = [torch.randn_like(leaf) * 0.1 for leaf in leaves]
            theirs = gradients_of(leaves, self.inputs(features), cotangents)
            theirs += [*leaves, *self._statistics().values()]
            numbers = self._numbers()
            self._begin(own)
            again, features = self.alone(nudge=_ROUNDING.get(self._precision(), 1e-6))
            wide = leaves_of(self.tensors, again)
            nudged = gradients_of(wide, self.inputs(features), cotangents)
            nudged += [*wide, *self._statistics().values()]
            self._begin(own)
            scene.fill = _TRIAL_FILL
            features = self.capacity(scene)
            wide = leaves_of(self.tensors, self.over(scene, features))
            if len(wide) != len(leaves):
                raise UnpaddedError("it returns less over a padded input.")
            pairs = zip(cotangents, wide, strict=True)
            mine = gradients_of(wide, self.inputs(features), [_widened(*pair) for pair in pairs])
            mine += [leaf[: rows[scene.level_of(leaf)]] for leaf in wide]
            mine += self._statistics().values()
            if features.requires_grad and mine[0] is not None:
                mine[0] = mine[0][: self.features.shape[0]]
            for name, one in self._numbers().items():
                if not torch.equal(one, numbers[name]):
                    raise UnpaddedError(f"{name} differs over a padded input.")
            names = self._names(features, len(wide))
            _compare(names, mine, theirs, nudged, self._precision())
        finally:
            self.buffers, scene.fill = own, 0.0

    def _begin(self, buffers: dict[str, torch.Tensor]) -> None:
        """Go on from these values."""
        self.buffers = {name: value.clone() for name, value in buffers.items()}

    def _names(self, features: torch.Tensor, outputs: int) -> list[str]:
        inputs = ["the features"] if features.requires_grad else []
        inputs += self.trained
        return (
            [f"the gradient of {name}" for name in inputs]
            + [f"output {number}" for number in range(outputs)]
            + list(self._statistics())
        )

    def _precision(self) -> torch.dtype:
        """What rounding to expect."""
        own: torch.dtype = self.features.dtype
        return autocast_dtype(self.features.device) or own

    def _statistics(self) -> dict[str, torch.Tensor]:
        """The buffers that know rounding."""
        return {name: one for name, one in self.buffers.items() if one.is_floating_point()}

    def _numbers(self) -> dict[str, torch.Tensor]:
        """The other buffers."""
        return {name: one for name, one in self.buffers.items() if not one.is_floating_point()}


def leaves_of(tensors: Tensors, value: Any) -> list[torch.Tensor]:
    """The tensors of an output through which gradients come, each once."""
    found: dict[int, torch.Tensor] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    rebuilt(tensors, value, look)
    if not found:
        raise UnpaddedError("its output does not depend on what is trained.")
    return list(found.values())


def gradients_of(
    leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> list[Any]:  # fmt: skip
    return list(torch.autograd.grad(leaves, inputs, cotangents, allow_unused=True))


def _widened(rows: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """`rows`, and zeros behind them as `wide` has rows."""
    return torch.cat([rows, rows.new_zeros((len(wide) - len(rows), *rows.shape[1:]))])


def _compare(
    names: list[str], mine: list[Any], theirs: list[Any], nudged: list[Any], dtype: torch.dtype
) -> None:
    """Raise UnpaddedError unless these tensors agree within rounding.

    nudged: theirs after a change of the features as small as rounding, which shows how much
    rounding moves each tensor. Gradients that are but rounding, as of a bias before a norm, are
    measured by the others.
    """
    tolerance = tolerances.of("replay", dtype).rms
    mine, theirs, nudged = (
        [None if one is None else one.detach() for one in several]
        for several in (mine, theirs, nudged)
    )
    present = [one for one in theirs if one is not None and one.numel()]
    scale = math.sqrt(
        sum(float(one.double().square().sum()) for one in present)
        / max(1, sum(one.numel() for one in present))
    )
    if not math.isfinite(scale):
        raise UnpaddedError("its outputs or gradients are not finite.")
    for name, one, other, moved in zip(names, mine, theirs, nudged, strict=True):
        if (one is None) != (other is None) or (one is not None and one.shape != other.shape):
            raise UnpaddedError(f"{name} has another shape over a padded input.")
        if one is None or not one.numel():
            continue
        allowed = tolerance * (float(other.double().norm()) + scale * math.sqrt(other.numel()))
        allowed += 3 * float((moved.double() - other.double()).norm())
        error = float((one.double() - other.double()).norm())
        if not error <= allowed:
            raise UnpaddedError(
                f"it mixes rows outside its sparse layers and batch norms: over a "
                f"padded input, {name} is off by {error:.2e}; {allowed:.2e} would be rounding."
            )


@contextlib.contextmanager
def _counted_norms(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms that know how many rows of a padded scene there are."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            if type(module) is nn.BatchNorm1d:
                forward = module.__dict__.get("forward")
                before.append((module, forward))
                module.__dict__["forward"] = functools.partial(_normalise, module, forward)
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def _normalise(module: nn.BatchNorm1d, forward: Any, x: torch.Tensor) -> torch.Tensor:
    scene = padded.current()
    mean, var = module.running_mean, module.running_var
    if scene is None or not (module.training or (mean is None and var is None)):
        own: torch.Tensor = nn.BatchNorm1d.forward(module, x) if forward is None else forward(x)
        return own
    if module.momentum is None:
        raise UnpaddedError("momentum=None of a batch norm counts batches on the host.")
    tracked = module.training and module.track_running_stats
    return batch_norm(
        x, module.weight, module.bias, mean if tracked else None, var if tracked else None,
        momentum=module.momentum, eps=module.eps, count=scene.counts[scene.level_of(x)],
        batches=module.num_batches_tracked if tracked else None,
    )  # fmt: skip
