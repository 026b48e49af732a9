"""spconv's geometry rules as offset lists and boxes of the core."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core.geometry.boxes import Box
from ...core.geometry.offsets import Offsets, box_offsets
from ...errors import DataTypeError, GeometryError


class OutputSizeError(GeometryError, RuntimeError):
    """A layer would produce a grid without cells."""


class EvenKernelError(GeometryError, RuntimeError):
    """A submanifold layer with an even kernel size."""


class DimensionError(GeometryError, RuntimeError):
    """A layer of one dimension on a tensor of another."""


class KernelSizeError(GeometryError, ZeroDivisionError, RuntimeError):
    """Kernel size, stride, dilation or channels below 1: spconv divides by zero, or torch refuses the weight."""


def check_dimension(layer: Any, x: Any) -> None:
    """Raise DimensionError when the layer's dimension is not that of the tensor."""
    n_axes = x.indices.shape[1] - 1
    if layer.ndim != n_axes or len(x.spatial_shape) != n_axes:
        raise DimensionError(
            f"{type(layer).__name__} is {layer.ndim}-dimensional; its input has "
            f"{n_axes} coordinate columns and a grid of {list(x.spatial_shape)}."
        )


def check_axes(**values: Any) -> None:
    """Raises DataTypeError or GeometryError, by name, for what is no list, or not as long as the first one."""
    n_axes = None
    for name, value in values.items():
        if not hasattr(value, "__len__"):
            raise DataTypeError(f"{name} is {value!r}; expected a list of integers, one per axis.")
        n_axes = len(value) if n_axes is None else n_axes
        if len(value) != n_axes:
            raise GeometryError(f"{name} has {len(value)} entries, {list(value)}; expected {n_axes}, one per axis.")


def _check_positive(argument: str, values: Sequence[int]) -> None:
    if min(values) < 1:
        raise KernelSizeError(f"{argument} {list(values)}; every axis needs at least 1.")


def conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Per axis floor((I + 2p - d(k - 1) - 1) / s) + 1; k == -1 collapses an axis to 1."""
    _check_positive("stride", stride)
    sizes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [1 if k == -1 else (size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]


def deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """Per axis (I - 1)s - 2p + k + output_padding. spconv leaves dilation out, so this does too."""
    if -1 in kernel_size:
        raise GeometryError("a transposed convolution has no output size for kernel size -1.")
    _check_positive("stride", stride)
    sizes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(size - 1) * s - 2 * p + k + extra for size, k, s, p, extra in sizes]


@functools.cache
def strided_offsets(kernel_size: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...]) -> Offsets:
    """Input coordinate = s * output + offset, offset = r * d - p (regular, transposed, inverse)."""
    _check_positive("kernel size", kernel_size)
    _check_positive("dilation", dilation)
    return box_offsets(kernel_size, dilation, padding)


@functools.cache
def submanifold_offsets(kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> Offsets:
    """offset = (r - k // 2) * d. Raises EvenKernelError; stride and padding play no part."""
    _check_positive("kernel size", kernel_size)
    _check_positive("dilation", dilation)
    if any(k % 2 == 0 for k in kernel_size):
        raise EvenKernelError(
            f"submanifold kernel size {list(kernel_size)}; only odd sizes have a centre. "
            "Use an odd kernel size, or SparseConv for an even one."
        )
    origin = tuple(k // 2 * d for k, d in zip(kernel_size, dilation, strict=True))
    return box_offsets(kernel_size, dilation, origin)


class LayerGeometry(NamedTuple):
    """What decides a layer's kernel map besides its input: the values of its constructor.

    kernel, stride, padding, dilation, output_padding: per axis.  subm: outputs are the inputs;
    stride and padding play no part.  transposed: every input spreads over its kernel.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    subm: bool
    transposed: bool

    @classmethod
    def of(cls, layer: Any) -> LayerGeometry:
        """That of a convolution or pool as it is now."""
        return cls(
            tuple(layer.kernel_size),
            tuple(layer.stride),
            tuple(layer.padding),
            tuple(layer.dilation),
            tuple(getattr(layer, "output_padding", ())),
            layer.subm,
            getattr(layer, "transposed", False),
        )

    def numbers(self, order: int) -> list[int]:
        """As graphs hold it, with the number of the order of new rows.  Programs that were exported have them so."""
        n_axes = len(self.kernel)
        rule = [n_axes, int(self.subm), int(self.transposed), order, *self.kernel, *self.stride, *self.padding]
        return [*rule, *self.dilation, *(self.output_padding or (0,) * n_axes)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> tuple[LayerGeometry, int]:
        """(the geometry, the order) of `numbers`."""
        n_axes, subm, transposed, order, *flat_sizes = numbers
        sizes = [tuple(flat_sizes[at : at + n_axes]) for at in range(0, len(flat_sizes), n_axes)]
        return cls._make([*sizes, bool(subm), bool(transposed)]), order

    @property
    def rule(self) -> LayerGeometry:
        """What of it decides where outputs lie: a rule of requests, alike for layers that share
        maps."""
        return self if self.transposed else self._replace(output_padding=())

    def output_box(self, box: Box) -> Box:
        """The grid behind the grid `box`."""
        shape = self.output_shape(list(box.size[1:]), "A layer")
        return Box.grid(box.size[0], shape)

    def output_shape(self, shape: list[int], layer_name: str) -> list[int]:
        """The grid that comes of `shape`. Raises OutputSizeError, KernelSizeError, GeometryError.

        layer_name: for messages.
        """
        if self.subm:
            size = shape
        elif self.transposed:
            size = deconv_output_size(shape, self.kernel, self.stride, self.padding, self.dilation, self.output_padding)
        else:
            size = conv_output_size(shape, self.kernel, self.stride, self.padding, self.dilation)
        if min(size) <= 0:
            raise OutputSizeError(
                f"{layer_name} turns a grid of {shape} into {size}; every axis needs at least one cell. "
                "Use a larger grid, less stride or more padding."
            )
        return size

    @property
    def offsets(self) -> Offsets:
        """In the order of the weight. Raises KernelSizeError, EvenKernelError."""
        if self.subm:
            return submanifold_offsets(self.kernel, self.dilation)
        return strided_offsets(self.kernel, self.dilation, self.padding)


@functools.cache  # scenes bring grids of ever new sizes, layers do not
def request_of(geometry: LayerGeometry, order: str) -> tuple[str, Offsets, tuple[int, ...], Any, str]:
    """What a layer asks for, a `MapRequest` but for its box.  order: of new rows."""
    if geometry.subm:
        return "submanifold", geometry.offsets, (), None, "given"
    map_type = "generative" if geometry.transposed else "strided"
    return map_type, geometry.offsets, geometry.stride, geometry.rule, order
