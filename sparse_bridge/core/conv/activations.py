"""The activations of an epilogue: a row each, which kernels, layers, fusion, graphs and exports read.

A new one is a row here and a branch of `activated` in `export/cpp/operators/products.cpp`; if kernels
compute it, a number in `kernels/tiles/activation_numbers.py` and a branch of `_activated` in
`kernels/gemm/epilogue.py`. Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...hooks import TORCHS_LEAKY_RELU, TORCHS_LEAKY_RELU_, TORCHS_RELU, TORCHS_RELU_, TORCHS_SIGMOID, TORCHS_SIGMOID_
from ...kernels.tiles.activation_numbers import NUMBERS


def _plain(inplace: bool = False) -> tuple[float, bool]:
    return 0.0, inplace


def _leaky(negative_slope: float = 0.01, inplace: bool = False) -> tuple[float, bool]:
    return float(negative_slope), inplace


class Activation(NamedTuple):
    """name: of `Epilogue.activation`; torch computes those that have none of the `NUMBERS`.
    apply, apply_: of results and the slope, anew and in place.
    calls, calls_: functions of torch that programs call for it, anew and in place.
    arguments: (slope, whether in place) of the arguments behind the input of such a call.
    module: torch's, called as in spconv's enumeration.  slope: the attribute of it that holds the slope.
    onnx: the operator.  act_type: number of spconv and of TensorRT's plugins, 0 where they lack it.
    """

    name: str
    apply: Callable[[Tensor, float], Tensor]
    apply_: Callable[[Tensor, float], Tensor]
    calls: tuple[Any, ...]
    calls_: tuple[Any, ...]
    arguments: Callable[..., tuple[float, bool]]
    module: type[nn.Module]
    slope: str | None = None
    onnx: str | None = None
    act_type: int = 0

    def slope_of(self, module: nn.Module) -> float:
        """The slope of a module of this kind."""
        return 0.0 if self.slope is None else float(getattr(module, self.slope))


_ROWS = (
    Activation(
        "relu",
        lambda y, _: TORCHS_RELU(y),
        lambda y, _: TORCHS_RELU_(y),
        (F.relu, torch.relu, Tensor.relu),
        (torch.relu_, Tensor.relu_),
        _plain,
        nn.ReLU,
        onnx="Relu",
        act_type=1,
    ),
    Activation(
        "leaky_relu",
        lambda y, slope: TORCHS_LEAKY_RELU(y, slope),
        lambda y, slope: TORCHS_LEAKY_RELU_(y, slope),
        (F.leaky_relu,),
        (),
        _leaky,
        nn.LeakyReLU,
        "negative_slope",
        "LeakyRelu",
        3,
    ),
    Activation(
        "sigmoid",
        # Triton's exponential is not torch's: fp32 has other bits, and what halves have only a device can
        # tell (benchmarks/notes/deferred.md).
        lambda y, _: TORCHS_SIGMOID(y),
        lambda y, _: TORCHS_SIGMOID_(y),
        (F.sigmoid, torch.sigmoid, Tensor.sigmoid),
        (torch.sigmoid_, Tensor.sigmoid_),
        _plain,
        nn.Sigmoid,
        onnx="Sigmoid",
        act_type=2,
    ),
)
ACTIVATIONS = {row.name: row for row in _ROWS}
assert NUMBERS.keys() - {None} <= ACTIVATIONS.keys()


def row_of(module: nn.Module) -> Activation | None:
    """The activation that a module of torch's class, or of a subclass, is; None for others."""
    return next((row for row in ACTIVATIONS.values() if isinstance(module, row.module)), None)


def activated(y: Tensor, name: str | None, alpha: float) -> Tensor:
    """y behind an activation of this slope, a new tensor; y itself where there is none."""
    return y if name is None else ACTIVATIONS[name].apply(y, alpha)


def activated_(y: Tensor, name: str | None, alpha: float) -> Tensor:
    """The same in place."""
    return y if name is None else ACTIVATIONS[name].apply_(y, alpha)
