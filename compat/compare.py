"""Comparing what two runs of a model give: RMS and largest error, relative to the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from sparse_bridge import tolerances

__all__ = ["Limits", "assert_close", "assert_finite", "assert_gradients_close"]

# The largest error may be so many times the RMS limit: activations have kinks.
_PEAK, _GRADIENT_PEAK = 30, 100
# Gradients jump where rounding moves an activation across the kink of a ReLU: one such row among
# the few of a deep layer changes them by a hundredth. In float64 that does not happen.
_GRADIENT = {"float64": 10, "float32": 500, "float16": 20, "bfloat16": 4}
# Gradients below this share of the average one are rounding: a bias before a norm has none.
_NOISE = {"float64": 1e-2, "float32": 1e-2, "float16": 1.0, "bfloat16": 1.0}


@dataclasses.dataclass(frozen=True)
class Limits:
    """RMS errors that are allowed for outputs and for gradients.

    noise: errors of smaller gradients count relative to this share of the average gradient.
    """

    output: float
    gradient: float
    noise: float

    @staticmethod
    def of(dtype: str, own: Mapping[str, float]) -> Limits:
        """Those of a dtype; own: where a model has another for outputs."""
        output = own.get(dtype, tolerances.of("network", dtype).rms)
        return Limits(output, output * _GRADIENT[dtype], _NOISE[dtype])


def assert_finite(tensors: Sequence[torch.Tensor], what: str) -> None:
    """AssertionError unless there are tensors, with elements, all finite."""
    assert tensors, f"{what}: no tensors"
    assert any(one.numel() for one in tensors), f"{what}: all {len(tensors)} tensors are empty"
    for index, one in enumerate(tensors):
        bad = int((~torch.isfinite(one.detach())).sum()) if one.is_floating_point() else 0
        assert not bad, f"{what} {index}: {bad} of {one.numel()} elements are not finite"


def assert_close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], limit: float, what: str) -> float:
    """AssertionError unless each tensor is within `limit`; returns the largest RMS error."""
    assert len(got) == len(want), f"{what}: {len(got)} tensors, expected {len(want)}"
    errors = [
        _error(a, b, _rms(b), limit, f"{what} {index}") for index, (a, b) in enumerate(zip(got, want, strict=True))
    ]
    return max(errors, default=0.0)


def assert_gradients_close(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], limits: Limits) -> float:
    """The same for gradients by parameter name; those near zero count relative to all."""
    different = set(got) ^ set(want)
    assert not different, f"only one side has gradients of {', '.join(sorted(different)[:3])}"
    total = sum(one.numel() for one in want.values())
    squares = sum(float(one.double().pow(2).sum()) for one in want.values())
    floor = limits.noise * math.sqrt(squares / max(total, 1))
    return max(
        (
            _error(got[name], one, max(_rms(one), floor), limits.gradient, f"gradient of {name}", _GRADIENT_PEAK)
            for name, one in want.items()
        ),
        default=0.0,
    )


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().pow(2).mean().sqrt()) if tensor.numel() else 0.0


def _error(got: torch.Tensor, want: torch.Tensor, scale: float, limit: float, what: str, peak: float = _PEAK) -> float:
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    if not want.numel():
        return 0.0
    gap = (got.detach().double().cpu() - want.detach().double().cpu()) / max(scale, 1e-12)
    rms, largest = float(gap.pow(2).mean().sqrt()), float(gap.abs().max())
    assert rms <= limit and largest <= peak * limit, (  # also false for NaN
        f"{what}: RMS error {rms:.1e} (limit {limit:.0e}), largest {largest:.1e} (limit {peak * limit:.0e})"
    )
    return rms
