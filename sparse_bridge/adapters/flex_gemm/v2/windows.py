"""Windows of layers, and the shapes that they lead to.

A shape is (batch sizes, S1 .. SD, C). One formula serves boxes and lists of offsets: a window reads
q * stride + offset, and its least and greatest offset per axis bound the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..arguments import Ints, per_axis, shape_entries
from ..arguments import kernel_size as kernel_sizes
from ..errors import ArgumentValueError
from ..lattice import Deltas
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
        pairs = zip(extents, self.stride, *self._bounds(), strict=True)
        return tuple(max(0, (s - low - high - 1) // step + 1) for s, step, low, high in pairs)

    def up(self, extents: Sequence[int]) -> Ints:
        """Extents of the fine side: (S - 1) * s + low + high + 1, at least 0."""
        pairs = zip(extents, self.stride, *self._bounds(), strict=True)
        return tuple(max(0, (s - 1) * step + low + high + 1) for s, step, low, high in pairs)

    def _bounds(self) -> tuple[Ints, Ints]:
        """The lowest and the highest offset of every axis."""
        columns = list(zip(*self.offsets, strict=True))
        return tuple(map(min, columns)), tuple(map(max, columns))


def box_window(kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Window:
    """Offsets t * dilation - padding, last axis fastest."""
    kernel = kernel_sizes(kernel_size, None)
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


def split(shape: Sequence[int] | None, n_batch: int, dimension: int, caller: str) -> tuple[Ints, Ints]:
    """(batch sizes, extents) of a shape. Raises ArgumentTypeError, ArgumentValueError."""
    layout = f"{n_batch} batch sizes, {dimension} extents and the channels last"
    numbers = shape_entries(shape, n_batch + dimension + 1, layout, f"the shape of {caller}")[:-1]
    return numbers[:n_batch], numbers[n_batch:]


def _reshaped(shape: Sequence[int], window: Window, up: bool) -> torch.Size:
    layout = f"batch sizes, {window.dimension} extents and the channels last"
    *numbers, channels = shape_entries(shape, None, layout) or (0,)
    n_batch = len(numbers) - window.dimension
    if n_batch < 0:
        raise ArgumentValueError(f"shape is {tuple(shape)}; expected {layout}.")
    extents = (window.up if up else window.down)(numbers[n_batch:])
    return torch.Size((*numbers[:n_batch], *extents, channels))


def compute_strided_kernel_size_output_shape(
    shape: Sequence[int], kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> torch.Size:
    """(batch sizes, extents, C) behind `sparse_conv`; kernel_size is a tuple."""
    return _reshaped(shape, box_window(kernel_size, stride, padding, dilation), up=False)


def compute_strided_kernel_delta_output_shape(
    shape: Sequence[int], kernel_delta: Any, stride: Any = 1, offset: Any = 0
) -> torch.Size:
    """The same for a kernel [V, D] of offsets."""
    return _reshaped(shape, delta_window(kernel_delta, stride, offset), up=False)


def compute_strided_kernel_size_transpose_output_shape(
    shape: Sequence[int], kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> torch.Size:
    """(batch sizes, extents, C) behind `sparse_conv_transpose`; kernel_size is a tuple."""
    return _reshaped(shape, box_window(kernel_size, stride, padding, dilation), up=True)


def compute_strided_kernel_delta_transpose_output_shape(
    shape: Sequence[int], kernel_delta: Any, stride: Any = 1, offset: Any = 0
) -> torch.Size:
    """The same for a kernel [V, D] of offsets."""
    return _reshaped(shape, delta_window(kernel_delta, stride, offset), up=True)
