"""Windows of layers, and the shapes that they lead to.

A shape is (batch sizes, S1 .. SD, C). One formula serves boxes and lists of offsets: a window reads
q * stride + offset, and its least and greatest offset per axis bound the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError
from ..lattice import Deltas, Ints
from ..submanifold import deltas_of


class Window(NamedTuple):
    """coarse[q] reads fine[q * stride + offset], for the offsets in order."""

    offsets: Deltas
    stride: Ints

    @property
    def dimension(self) -> int:
        return len(self.stride)

    def down(self, extents: Sequence[int]) -> Ints:
        """Extents of the coarse side: floor((S - low - high - 1) / s) + 1, at least 0."""
        pairs = zip(extents, self.stride, *self._ends(), strict=True)
        return tuple(max(0, (s - low - high - 1) // step + 1) for s, step, low, high in pairs)

    def up(self, extents: Sequence[int]) -> Ints:
        """Extents of the fine side: (S - 1) * s + low + high + 1, at least 0."""
        pairs = zip(extents, self.stride, *self._ends(), strict=True)
        return tuple(max(0, (s - 1) * step + low + high + 1) for s, step, low, high in pairs)

    def _ends(self) -> tuple[Ints, Ints]:
        columns = list(zip(*self.offsets, strict=True))
        return tuple(map(min, columns)), tuple(map(max, columns))


def per_axis(value: Any, dimension: int | None, name: str, least: int | None) -> Ints:
    """One integer per axis; a single one for all, where the dimension is known.

    Raises: ArgumentTypeError, ArgumentValueError.
    """
    if isinstance(value, int):
        if dimension is None:
            raise ArgumentTypeError(
                f"{name} is {value!r}; the form without a number takes a tuple, one entry per axis "
                "(or use the 2d, 3d or 4d form)."
            )
        numbers: Ints = (value,) * dimension
    else:
        numbers = tuple(int(number) for number in value)
    wrong = dimension is not None and len(numbers) != dimension
    if wrong or not numbers or (least is not None and min(numbers) < least):
        floor = "" if least is None else f" of at least {least}"
        raise ArgumentValueError(
            f"{name} is {value!r}; expected {dimension or 'its'} integers{floor}."
        )
    return numbers


def box_window(kernel: Ints, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Window:
    """Offsets t * dilation - padding, last axis fastest."""
    n = len(kernel)
    pads, steps = per_axis(padding, n, "padding", None), per_axis(dilation, n, "dilation", 1)
    axes = [[t * d - p for t in range(k)] for k, d, p in zip(kernel, steps, pads, strict=True)]
    return Window(tuple(itertools.product(*axes)), per_axis(stride, n, "stride", 1))


def delta_window(kernel_delta: Any, stride: Any = 1, offset: Any = 0) -> Window:
    """Offsets delta + offset."""
    deltas = deltas_of(kernel_delta)
    shift = per_axis(offset, len(deltas[0]), "offset", None)
    moved = tuple(tuple(c + o for c, o in zip(delta, shift, strict=True)) for delta in deltas)
    return Window(moved, per_axis(stride, len(shift), "stride", 1))


def centred_window(kernel: Ints, dilation: Any = 1) -> Window:
    """Of a submanifold layer: (t - (k - 1) // 2) * dilation."""
    steps = per_axis(dilation, len(kernel), "dilation", 1)
    pads = tuple((k - 1) // 2 * d for k, d in zip(kernel, steps, strict=True))
    return box_window(kernel, 1, pads, steps)


def split(
    shape: Sequence[int] | None, n_batch: int, dimension: int, what: str
) -> tuple[Ints, Ints]:
    """(batch sizes, extents) of a shape. Raises ArgumentValueError."""
    if shape is None or len(shape) != n_batch + dimension + 1:
        shown = None if shape is None else tuple(shape)
        raise ArgumentValueError(
            f"{what} got shape {shown}; expected {n_batch} batch sizes, {dimension} extents and "
            "the channels last."
        )
    numbers = tuple(int(size) for size in shape[:-1])
    return numbers[:n_batch], numbers[n_batch:]


def _reshaped(shape: Sequence[int], window: Window, up: bool) -> torch.Size:
    n_batch = len(shape) - 1 - window.dimension
    if n_batch < 0:
        raise ArgumentValueError(
            f"shape is {tuple(shape)}; expected batch sizes, {window.dimension} extents and the "
            "channels last."
        )
    batch, extents = split(shape, n_batch, window.dimension, "the shape function")
    return torch.Size((*batch, *(window.up if up else window.down)(extents), int(shape[-1])))


def compute_strided_kernel_size_output_shape(
    shape: Sequence[int], kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> torch.Size:
    """(batch sizes, extents, C) behind `sparse_conv`; kernel_size is a tuple."""
    kernel = per_axis(kernel_size, None, "kernel_size", 1)
    return _reshaped(shape, box_window(kernel, stride, padding, dilation), up=False)


def compute_strided_kernel_delta_output_shape(
    shape: Sequence[int], kernel_delta: Any, stride: Any = 1, offset: Any = 0
) -> torch.Size:
    """The same for a kernel [V, D] of offsets."""
    return _reshaped(shape, delta_window(kernel_delta, stride, offset), up=False)


def compute_strided_kernel_size_transpose_output_shape(
    shape: Sequence[int], kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> torch.Size:
    """(batch sizes, extents, C) behind `sparse_conv_transpose`; kernel_size is a tuple."""
    kernel = per_axis(kernel_size, None, "kernel_size", 1)
    return _reshaped(shape, box_window(kernel, stride, padding, dilation), up=True)


def compute_strided_kernel_delta_transpose_output_shape(
    shape: Sequence[int], kernel_delta: Any, stride: Any = 1, offset: Any = 0
) -> torch.Size:
    """The same for a kernel [V, D] of offsets."""
    return _reshaped(shape, delta_window(kernel_delta, stride, offset), up=True)
