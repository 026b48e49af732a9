"""Weights as strided views: the frameworks' own parameter memory, and a copy only where no view is."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from ...errors import OverflowLimitError, ShapeError

LAYOUTS = ("vio", "ovi")


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """w[v, i, o] of group g lies at shift + (v, i, o, g) . strides.

    c_in, c_out: channels per group. Counted in elements from the tensor's first one.  exchanged:
    input and output channels changed places (dgrad).
    """

    strides: tuple[int, int, int, int]
    shift: int
    n_offsets: int
    c_in: int
    c_out: int
    groups: int
    exchanged: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Layouts are keys in every layer's call."""
        sizes = (self.n_offsets, self.c_in, self.c_out, self.groups, self.exchanged)
        return hash((self.strides, self.shift, sizes))

    @property
    def columns_in(self) -> int:
        """Input channels of all groups."""
        return self.groups * self.c_in

    @property
    def columns_out(self) -> int:
        """Output channels of all groups."""
        return self.groups * self.c_out

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - few, small values
    def transposed(self) -> WeightLayout:
        """Input and output channels exchanged: the weight of dgrad."""
        stride_v, stride_i, stride_o, stride_g = self.strides
        strides = (stride_v, stride_o, stride_i, stride_g)
        return dataclasses.replace(
            self, strides=strides, c_in=self.c_out, c_out=self.c_in, exchanged=not self.exchanged
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def reversed(self) -> WeightLayout:
        """Offsets in reverse order."""
        stride_v, stride_i, stride_o, stride_g = self.strides
        shift = self.shift + (self.n_offsets - 1) * stride_v
        strides = (-stride_v, stride_i, stride_o, stride_g)
        return dataclasses.replace(self, strides=strides, shift=shift)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def in_rows(self) -> WeightLayout:
        """The layout of what `rows_of` returns."""
        if self.strides[0] < 0:
            return self.reversed().in_rows().reversed()
        n, i = self.n_offsets, self.c_in
        return dataclasses.replace(self, strides=(i, 1, n * i, self.c_out * n * i), shift=0)

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy [groups, c_out, V, c_in] of the weight, in its dtype: input channels next to each other."""
        if self.strides[0] < 0:
            return self.reversed().rows_of(tensor)
        stride_v, stride_i, stride_o, stride_g = self.strides
        shape = (self.groups, self.c_out, self.n_offsets, self.c_in)
        begin = tensor.storage_offset() + self.shift
        strides = (stride_g, stride_o, stride_v, stride_i)
        return tensor.as_strided(shape, strides, begin).contiguous()

    def matrices(self, tensor: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, ...]:
        """[c_in, c_out] of every offset of one group, in the dtype of `tensor`, the parameter that this layout
        reads: views of it, in the order of this layout's offsets."""
        if self.strides[0] >= 0:
            return self.stacked(tensor, group).unbind(0)
        stride_v, stride_i, stride_o, stride_g = self.strides
        begin = tensor.storage_offset() + self.shift + group * stride_g
        matrix, steps = (self.c_in, self.c_out), (stride_i, stride_o)
        return tuple(tensor.as_strided(matrix, steps, begin + v * stride_v) for v in range(self.n_offsets))

    def stacked(self, tensor: torch.Tensor, group: int = 0) -> torch.Tensor:
        """[V, c_in, c_out] of one group, a view of `tensor` in its dtype; offsets must not run backwards."""
        stride_v, stride_i, stride_o, stride_g = self.strides
        begin = tensor.storage_offset() + self.shift + group * stride_g
        shape, strides = (self.n_offsets, self.c_in, self.c_out), (stride_v, stride_i, stride_o)
        return tensor.as_strided(shape, strides, begin)

    def stacks(self, tensor: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """`stacked` of every group, in `dtype`; where offsets run backwards, in the order of the memory. Cast when they
        are cut out: a tensor that is cast need not keep its strides."""
        layout = self if self.strides[0] >= 0 else self.reversed()
        return [layout.stacked(tensor, group).to(dtype) for group in range(self.groups)]


def layout_of(tensor: torch.Tensor, layout: str, groups: int = 1) -> WeightLayout:
    """How a parameter, of any dtype, stores its matrices, or a contiguous copy of it where `is_read_as_copy`.

    "vio": [V, C_in / groups, C_out], any strides, V may be missing when it is 1.
    "ovi": [C_out, *kernel, C_in / groups], any strides.
    Raises: ShapeError for another layout or shape, an empty axis, or groups that do not divide C_out;
        OverflowLimitError for 2^31 elements or more.
    """
    return _layout(tuple(tensor.shape), tensor.stride(), layout, groups)[0]


def is_read_as_copy(tensor: torch.Tensor, layout: str) -> bool:
    """Whether no view of a parameter, of any dtype, goes from matrix to matrix in equal steps: axes of the kernel
    are in another order in memory, as in `torch.channels_last`. Raises: what `layout_of` does."""
    return _layout(tuple(tensor.shape), tensor.stride(), layout, 1)[1]


def fills_its_memory(x: torch.Tensor) -> bool:
    """Whether the elements of x (any shape and dtype) lie without gaps or overlaps, in any order of the axes.

    By hand: torch's answer on meta tensors imports a computer algebra system, which takes seconds.
    """
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def gradient_like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for a gradient in `dtype`, of the weight's shape, such as [V, C_in / groups, C_out], and in
    its strides, unless it overlaps itself."""
    end = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        if size > 1 and stride < end:
            return torch.empty(weight.shape, dtype=dtype, device=weight.device)
        end += stride * (size - 1)
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)


@functools.lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], layout: str, groups: int) -> tuple[WeightLayout, bool]:
    size, copied = math.prod(shape), False
    if size >= 1 << 31:
        raise OverflowLimitError(f"a weight of {size} elements; kernels take fewer than 2^31.")
    if layout == "vio":
        if len(shape) == 2:
            shape, strides = (1, *shape), (0, *strides)
        if len(shape) != 3:
            raise ShapeError(f"a weight of shape {list(shape)}; layout 'vio' takes [V, C_in, C_out].")
        n_offsets, c_in, columns = shape
        stride_v, stride_i, stride_o = strides
    elif layout == "ovi":
        if len(shape) < 2:
            raise ShapeError(f"a weight of shape {list(shape)}; layout 'ovi' takes [C_out, *kernel, C_in].")
        columns, *kernel, c_in = shape
        n_offsets, joined = math.prod(kernel), _joined(shape[1:-1], strides[1:-1])
        copied = joined is None
        if joined is None:
            stride_o, stride_v, stride_i = n_offsets * c_in, c_in, 1
        else:
            stride_o, stride_v, stride_i = strides[0], joined, strides[-1]
    else:
        raise ShapeError(f"weight layout {layout!r}; expected one of {', '.join(LAYOUTS)}.")
    if min(n_offsets, c_in, columns) < 1:
        raise ShapeError(
            f"a weight of shape {list(shape)}; expected at least one matrix, one input and one output channel."
        )
    if groups < 1:
        raise ShapeError(f"groups is {groups}; expected at least 1.")
    if columns % groups:
        raise ShapeError(f"{columns} output channels do not divide into {groups} groups.")
    c_out = columns // groups
    steps = stride_v, stride_i, stride_o, c_out * stride_o
    return WeightLayout(steps, 0, n_offsets, c_in, c_out, groups), copied


def _joined(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The stride of several axes read as one, row-major; None where they do not lie so."""
    n, step = 1, 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if n > 1 and stride != n * step:
            return None
        if n == 1:
            step = stride
        n *= extent
    return step
