"""Copies, sums and products of tensors with any strides: what networks do between layers, for programs
without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..runtime.launch import alignment, cdiv, register
from ..runtime.target import Target

# Names of the operations, by their numbers.
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "leaky")
UNARY = ("sigmoid", "silu", "gelu", "tanh", "exp", "elu")
NORMS = ("norm", "norm_relu")
OPERATIONS = ("copy", "relu", *BINARY, *UNARY, *NORMS)
AXES = 4
_BLOCK = 1024
OPTIONS = {"num_warps": 4}
_INTEGERS = [*("n", "size_1", "size_2", "size_3"), *(f"{name}_{axis}" for name in "aby" for axis in range(AXES))]


@triton.jit
def _place(i_0, i_1, i_2, i_3, s_0, s_1, s_2, s_3):
    """The offset of an element, by its place on every axis and the strides."""
    return i_0 * s_0.to(tl.int64) + i_1 * s_1.to(tl.int64) + i_2 * s_2.to(tl.int64) + i_3 * s_3.to(tl.int64)


@triton.jit(do_not_specialize=_INTEGERS)
def _elementwise(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    y_ptr,
    n,
    size_1,
    size_2,
    size_3,
    a_0,
    a_1,
    a_2,
    a_3,
    b_0,
    b_1,
    b_2,
    b_3,
    y_0,
    y_1,
    y_2,
    y_3,
    OPERATION: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid: (blocks of the n elements,). y = OPERATION of a and b; c and d, which only norms read, have the
    strides of b. Strides on four axes, whose sizes but the first one are size_1 .. size_3. FLOAT: computed in fp32."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = index < n
    i_3, rest = index % size_3, index // size_3
    i_2, rest = rest % size_2, rest // size_2
    i_1, i_0 = rest % size_1, rest // size_1
    value = tl.load(a_ptr + _place(i_0, i_1, i_2, i_3, a_0, a_1, a_2, a_3), mask=ok, other=0)
    if FLOAT:
        value = value.to(tl.float32)
    if OPERATION == "relu":
        value = tl.where(value < 0, 0, value)
    elif (OPERATION == "sigmoid") | (OPERATION == "silu"):
        sigmoid = 1 / (1 + tl.exp(-value))
        value = sigmoid if OPERATION == "sigmoid" else value * sigmoid
    elif OPERATION == "gelu":
        value = value * 0.5 * (1 + tl.erf(value * 0.7071067811865476))
    elif OPERATION == "tanh":
        small = tl.exp(-2 * tl.abs(value))
        value = tl.where(value < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    elif OPERATION == "exp":
        value = tl.exp(value)
    elif OPERATION == "elu":
        value = tl.where(value > 0, value, tl.exp(value) - 1)
    elif OPERATION != "copy":
        at = _place(i_0, i_1, i_2, i_3, b_0, b_1, b_2, b_3)
        other = tl.load(b_ptr + at, mask=ok, other=0)
        if FLOAT:
            other = other.to(tl.float32)
        if OPERATION == "add":
            value = value + other
        elif OPERATION == "sub":
            value = value - other
        elif OPERATION == "mul":
            value = value * other
        elif OPERATION == "div":
            value = tl.div_rn(value, other)
        elif OPERATION == "maximum":
            value = tl.maximum(value, other, propagate_nan=tl.PropagateNan.ALL)
        elif OPERATION == "minimum":
            value = tl.minimum(value, other, propagate_nan=tl.PropagateNan.ALL)
        elif OPERATION == "leaky":
            value = tl.where(value < 0, value * other, value)
        else:
            tl.static_assert((OPERATION == "norm") | (OPERATION == "norm_relu"))
            scale = tl.load(c_ptr + at, mask=ok, other=0).to(tl.float32)
            value = (value - other) * scale + tl.load(d_ptr + at, mask=ok, other=0).to(tl.float32)
            if OPERATION == "norm_relu":
                value = value.to(y_ptr.dtype.element_ty)  # the bits of one after the other, those of -0 among them
                value = tl.where(value < 0, 0, value)
    place = _place(i_0, i_1, i_2, i_3, y_0, y_1, y_2, y_3)
    tl.store(y_ptr + place, value.to(y_ptr.dtype.element_ty), mask=ok)


elementwise_kernel = register(_elementwise)


def elementwise(operation: str, operands: Sequence[torch.Tensor], y: torch.Tensor, target: Target) -> torch.Tensor:
    """Write y = operand, OPERATION of operands, or for norms (a - b) * c + d, perhaps with a ReLU behind it, with the
    shape of y, to which operands are broadcast; b, c and d have one shape and contiguous or equal strides.

    Dtypes: fp16, bf16 and fp32, computed in fp32 and rounded once; sums, differences, products and copies also of
    int32 and int64, computed in the dtype of the first operand. Raises KernelError above four axes that do not
    merge, or 2^31 elements.
    """
    a, b = operands[0].expand(y.shape), operands[min(1, len(operands) - 1)].expand(y.shape)
    c, d = (operands[2].expand(y.shape), operands[3].expand(y.shape)) if len(operands) == 4 else (b, b)
    assert c.stride() == b.stride() == d.stride()
    if y.numel() == 0:
        return y
    along = sorted(range(y.ndim), key=y.stride, reverse=True)  # neighbours in memory are neighbouring lanes
    sizes, strides = merged(
        [y.shape[axis] for axis in along], [[one.stride(axis) for axis in along] for one in (a, b, y)]
    )
    if len(sizes) > AXES or y.numel() >= 1 << 31:
        raise KernelError(f"{operation} of shape {list(y.shape)}: expected at most {AXES} axes and 2^31 - 1 elements.")
    lacking = AXES - len(sizes)
    sizes = (*[1] * lacking, *sizes)
    own = [(*[0] * lacking, *each) for each in strides]
    constants = (operation, y.is_floating_point() or a.is_floating_point(), _BLOCK)
    elementwise_kernel.launch(
        y.device,
        target,
        (cdiv(y.numel(), _BLOCK), 1, 1),
        (a, b, c, d, y, y.numel(), *sizes[1:], *own[0], *own[1], *own[2]),
        constants,
        OPTIONS,
        (constants, a.dtype, b.dtype, c.dtype, d.dtype, y.dtype, alignment(a, b, c, d, y)),
    )
    return y


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(sizes, strides of every tensor) of as few axes as address the same elements in the same order."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis in range(len(shape)):
        if shape[axis] == 1:
            continue
        size, steps = shape[axis], [each[axis] for each in strides]
        if sizes and all(own[-1] == step * size for own, step in zip(kept, steps, strict=True)):
            sizes[-1] *= size
            for own, step in zip(kept, steps, strict=True):
                own[-1] = step
        else:
            sizes.append(size)
            for own, step in zip(kept, steps, strict=True):
                own.append(step)
    assert math.prod(sizes) == math.prod(shape)
    return tuple(sizes), [tuple(own) for own in kept]
