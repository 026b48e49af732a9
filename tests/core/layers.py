"""Layers of every kind on random coordinates, with a truth that the engine has no part in.

Up to three dimensions the truth is a dense torch convolution, above that `core.reference`.
"""

from __future__ import annotations

import dataclasses

import torch

from sparse_bridge.core import functional
from sparse_bridge.core.maps.kernel_map import KernelMap
from tests import oracle, reference
from tests.checks import assert_close
from tests.clouds import cloud

KINDS = ("submanifold", "strided", "generative", "inverse", "between")
SHAPES = {1: (40,), 2: (9, 10), 3: (6, 7, 5), 4: (3, 4, 3, 4)}


@dataclasses.dataclass
class Layer:
    """One geometry: kernel map, coordinates of both ends, pairs of the reference."""

    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    shape: tuple[int, ...]
    x_coords: torch.Tensor
    y_coords: torch.Tensor
    kmap: KernelMap
    pairs: reference.Pairs
    dense: bool

    @property
    def volume(self) -> int:
        return len(self.pairs)

    def truth(self, x, weight, bias=None, groups=1):
        """fp64 result for x [N_in, C_in], weight [V, C_in / groups, C_out]."""
        if not self.dense:
            return reference.conv(x, weight, bias, self.pairs, len(self.y_coords), groups)
        transposed = self.kind in ("generative", "inverse")
        dense = oracle.dense_conv_transpose if transposed else oracle.dense_conv
        y = dense(
            x,
            self.x_coords,
            self.shape,
            (weight, self.kernel),
            self.y_coords,
            self.stride,
            self.padding,
            self.dilation,
            groups,
        )
        return y if bias is None else y + bias.double()


def _vector(value, dimension):
    return (value,) * dimension if isinstance(value, int) else tuple(value)


def layer(
    kind,
    dimension=3,
    kernel=3,
    stride=None,
    padding=None,
    dilation=1,
    shape=None,
    coords=None,
    *,
    y_coords=None,
    batch_size=2,
    share=None,
    seed=0,
    device="cpu",
    empty_items=(),
    dense=True,
):
    """A `Layer`.

    coords, y_coords: given ones instead of random clouds; pass dense=False where they repeat or lie
    outside the grid.  padding None: centred.
    """
    shape = SHAPES[dimension] if shape is None else shape
    dimension = len(shape)
    kernel, dilation = _vector(kernel, dimension), _vector(dilation, dimension)
    stride = _vector((1 if kind == "submanifold" else 2) if stride is None else stride, dimension)
    if padding is None:
        padding = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    padding = _vector(padding, dimension)
    offsets = functional.kernel_offsets(kernel, dilation=dilation, padding=padding)
    if coords is None:
        share = share or (0.1 if kind == "generative" and dimension > 2 else 0.3)
        coords = cloud(shape, batch_size, share, seed, empty_items=empty_items)
    outside = "error" if dense else "ignore"
    cmap = functional.coordinate_map(coords.to(device), shape, batch_size, outside=outside)
    values, box = offsets.values, cmap.box
    if kind == "submanifold":
        kmap, y_coords = functional.submanifold(cmap, offsets), coords
        pairs = reference.submanifold_pairs(coords, box, values)
    elif kind == "generative":
        new, kmap = functional.generative(cmap, offsets, stride)
        y_coords = reference.generative_coords(coords, box, values, stride, new.box)
        pairs = reference.find_pairs(y_coords, new.box, coords, box, values, stride)
        pairs = reference.swapped(pairs)
        assert torch.equal(new.coords.cpu(), y_coords)
    elif kind == "between":
        outer = functional.conv_shape(shape, kernel, stride=stride, padding=padding, dilation=dilation)
        if y_coords is None:
            y_coords = cloud(outer, batch_size, 0.6, seed + 100)
        given = functional.coordinate_map(y_coords.to(device), outer, batch_size)
        kmap = functional.between(cmap, given, offsets, stride)
        pairs = reference.find_pairs(coords, box, y_coords, given.box, values, stride)
    else:
        outer = functional.conv_shape(shape, kernel, stride=stride, padding=padding, dilation=dilation)
        new, kmap = functional.strided(cmap, offsets, stride, outer)
        y_coords = reference.strided_coords(coords, box, values, stride, new.box)
        pairs = reference.find_pairs(coords, box, y_coords, new.box, values, stride)
        assert torch.equal(new.coords.cpu(), y_coords)
        if kind == "inverse":
            kmap, pairs = functional.inverse(kmap), reference.swapped(pairs)
            coords, y_coords, shape = y_coords, coords, outer
    assert (kmap.n_in, kmap.n_out) == (len(coords), len(y_coords))
    dense = dense and dimension <= 3
    geometry = (kind, kernel, stride, padding, dilation, shape)
    return Layer(*geometry, coords, y_coords, kmap, pairs, dense)


def tensors(layer, c_in, c_out, *, dtype=torch.float32, groups=1, bias=True, seed=0):
    """Random (x, weight, bias, dy) on the CPU, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    scale = (layer.volume * c_in / groups) ** -0.5
    x = torch.randn(len(layer.x_coords), c_in, generator=generator)
    weight = torch.randn(layer.volume, c_in // groups, c_out, generator=generator) * scale
    shift = torch.randn(c_out, generator=generator) if bias else None
    dy = torch.randn(len(layer.y_coords), c_out, generator=generator)
    return [None if t is None else t.to(dtype) for t in (x, weight, shift, dy)]


def leaves(values, device):
    """Copies that require gradients."""
    return [None if v is None else v.detach().clone().to(device).requires_grad_() for v in values]


def both_tables(kmap):
    """Rows that outputs gather, and those that gradients do. Where coordinates repeat, the second
    are no table of the pairs read backwards."""
    book, back = kmap.rulebook, kmap.rulebook.backward
    found = [book.table(0), book.table(1) if back is None else back.rulebook.table(0)]
    return [table.nbr for table, _ in found]


def check(layer, c_in, c_out, lane, *, dtype=torch.float32, tolerance=None, groups=1, bias=True, seed=0, **options):
    """Forward and all three gradients of a layer against its truth in fp64, from rounded inputs."""
    *operands, dy = tensors(layer, c_in, c_out, dtype=dtype, groups=groups, bias=bias, seed=seed)
    x, weight, shift = leaves(operands, lane.device)
    with lane.serving(dtype):
        y = functional.conv(x, weight, shift, layer.kmap, groups=groups, **options)
        assert y.dtype == dtype and y.shape == dy.shape
        y.backward(dy.to(lane.device))
    exact = [None if t is None else t.double() for t in operands]
    x64, weight64, shift64 = leaves(exact, "cpu")
    want = layer.truth(x64, weight64, shift64, groups)
    want.backward(dy.double())
    tolerance = dtype if tolerance is None else tolerance
    assert_close(y, want, tolerance, "y")
    for what, got, truth in (("dx", x, x64), ("dw", weight, weight64), ("db", shift, shift64)):
        if truth is not None:
            assert got.grad.dtype == dtype
            gradient = torch.zeros_like(truth) if truth.grad is None else truth.grad
            assert_close(got.grad, gradient, tolerance, what)
