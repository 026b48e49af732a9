"""What callers may pass: tensors, and integers per axis."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ...errors import DeviceError, tensor_expected
from .errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError

Ints = tuple[int, ...]

MAX_VOLUME = 1 << 16  # kernel offsets of one layer
INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(caller: str, **values: Any) -> None:
    """Raises ArgumentTypeError unless every value is a dense tensor, DeviceError where one has no
    values."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise tensor_expected(value, name, caller)
        if value.layout is not torch.strided:
            raise ArgumentTypeError(
                f"{caller} got {name} of layout {value.layout}; expected a dense tensor (use .to_dense())."
            )
        if value.is_meta:
            raise DeviceError(f"{caller} got {name} on the meta device, which holds no values.")


def check_operands(caller: str, feats: Any, weight: Any, bias: Any) -> None:
    """`check_tensors` of a product; bias may be None."""
    if bias is None:
        check_tensors(caller, feats=feats, weight=weight)
    else:
        check_tensors(caller, feats=feats, weight=weight, bias=bias)


def kernel_of(caller: str, feats: Any, weight: Any, bias: Any) -> tuple[int, int, int]:
    """Kernel size of a weight [C_out, k1, k2, k3, C_in] that fits the features. Raises
    ArgumentTypeError, ArgumentValueError, ArgumentShapeError."""
    check_operands(caller, feats, weight, bias)
    if weight.ndim != 5:
        raise ArgumentValueError(
            f"{caller} got a weight of shape {list(weight.shape)}; expected [C_out, k1, k2, k3, C_in]."
        )
    if feats.ndim != 2 or feats.shape[1] != weight.shape[4]:
        raise ArgumentShapeError(
            f"{caller} got features of shape {list(feats.shape)} for a weight of {weight.shape[4]} "
            f"input channels; expected [N, {weight.shape[4]}]."
        )
    return tuple(weight.shape[1:4])


def check_features(caller: str, feats: Any) -> None:
    """Raises ArgumentTypeError unless `feats` is a dense tensor of a dtype that is served."""
    check_tensors(caller, feats=feats)
    if feats.dtype not in _FLOATS:
        raise ArgumentTypeError(f"{caller} got features of {feats.dtype}; expected one of fp16, bf16, fp32, fp64.")


def integers(values: Any, name: str) -> Ints:
    """A sequence of integers, of Python, numpy or torch. Raises ArgumentTypeError."""
    try:
        return tuple(map(operator.index, values))
    except (TypeError, RuntimeError, ValueError):
        raise ArgumentTypeError(f"{name} is {values!r}; expected a sequence of integers.") from None


def per_axis(value: Any, dimension: int | None, name: str, least: int | None) -> Ints:
    """One integer per axis; a single one for all, where the dimension is known.

    Raises: ArgumentTypeError, ArgumentValueError.
    """
    single = hasattr(value, "__index__") and not getattr(value, "ndim", 0)
    if single and dimension is None:
        raise ArgumentTypeError(
            f"{name} is {value!r}; the form without a number takes a tuple, one entry per axis (or "
            "use the 2d, 3d or 4d form)."
        )
    numbers = integers((value,) * (dimension or 1) if single else value, name)
    wrong = dimension is not None and len(numbers) != dimension
    if wrong or not numbers or (least is not None and min(numbers) < least):
        floor = "" if least is None else f" of at least {least}"
        raise ArgumentValueError(f"{name} is {value!r}; expected {dimension or 'its'} integers{floor}.")
    return numbers


def kernel_size(value: Any, dimension: int | None, name: str = "kernel_size") -> Ints:
    """Sizes of a kernel or factors of a grid. Raises ArgumentTypeError, ArgumentValueError."""
    numbers = per_axis(value, dimension, name, 1)
    if math.prod(numbers) > MAX_VOLUME:
        raise ArgumentValueError(
            f"{name} {numbers} has {math.prod(numbers)} kernel offsets; at most {MAX_VOLUME} are served."
        )
    return numbers


def shape_entries(shape: Any, n_entries: int | None, layout: str, name: str = "shape") -> Ints:
    """The entries of a shape, none negative.  n_entries: None: any number.

    Raises: ArgumentTypeError, ArgumentValueError.
    """
    try:
        count = len(shape)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {shape!r}; expected {layout}.") from None
    if n_entries is not None and count != n_entries:
        raise ArgumentValueError(f"{name} is {tuple(shape)}; expected {layout}.")
    numbers = integers(shape, name)
    if numbers and min(numbers) < 0:
        raise ArgumentValueError(f"{name} is {numbers}; sizes cannot be negative.")
    return numbers
