"""Random geometries: what hypothesis draws, and the layers of `tests.core.layers` made from it."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.clouds import cloud
from tests.core.layers import KINDS, Layer, layer

__all__ = ["CHANNELS", "DTYPES", "cases", "make"]

EXTENT = {1: 24, 2: 9, 3: 6, 4: 4}  # most cells along an axis, by dimension
KERNEL = {1: 7, 2: 5, 3: 3, 4: 2}
CHANNELS = (1, 3, 8, 16, 33)  # on a GPU every count may be a kernel of its own to compile
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@st.composite
def cases(draw, kinds=KINDS, dimensions=(1, 2, 3, 4), awkward=True):
    """Arguments of `make`, a dict. awkward: coordinates may repeat and lie outside the grid."""
    dimension = draw(st.sampled_from(dimensions))
    kind = draw(st.sampled_from(kinds))

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dimension))

    kernel, dilation = per_axis(1, KERNEL[dimension]), per_axis(1, 3)
    stride = (1,) * dimension if kind == "submanifold" else per_axis(1, 3)
    most = [k // 2 * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = draw(st.none() | st.tuples(*(st.integers(0, p) for p in most)))
    batch_size = draw(st.integers(1, 4))
    return {
        "kind": kind,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "shape": per_axis(1, EXTENT[dimension]),
        "batch_size": batch_size,
        "empty": draw(st.sets(st.integers(0, batch_size - 1))),
        "share": draw(st.sampled_from((0.02, 0.1, 0.3, 0.9))),
        "seed": draw(st.integers(0, 999)),
        "repeat": awkward and draw(st.booleans()),
        "stray": awkward and draw(st.booleans()),
    }


def make(case: dict, device: str) -> Layer:
    """The layer of a case; its grid grows until every axis has a cell of output."""
    kernel, dilation, padding = case["kernel"], case["dilation"], case["padding"]
    if padding is None:
        padding = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    shape = tuple(
        max(extent, d * (k - 1) + 1 - 2 * p)
        for extent, k, d, p in zip(case["shape"], kernel, dilation, padding, strict=True)
    )
    awkward = case["repeat"] or case["stray"]
    coords = cloud(shape, case["batch_size"], case["share"], case["seed"], empty_items=case["empty"])
    generator = torch.Generator().manual_seed(case["seed"])
    if case["repeat"] and len(coords):
        again = torch.randint(len(coords), (1 + len(coords) // 2,), generator=generator)
        coords = torch.cat([coords, coords[again]])
    if case["stray"] and len(coords):
        lost = coords[: 1 + len(coords) // 4].clone()
        lost[:, -1] += torch.where(lost[:, -1] % 2 == 0, shape[-1], -shape[-1] - 1).int()
        coords = torch.cat([coords, lost])
    if awkward:
        coords = coords[torch.randperm(len(coords), generator=generator)].contiguous()
    # torch's own dense convolutions refuse some grids of one cell, and grids without sites.
    dense = not awkward and len(coords) > 0 and min(shape) > 1
    return layer(
        case["kind"],
        len(shape),
        kernel,
        case["stride"],
        padding,
        dilation,
        shape,
        coords,
        batch_size=case["batch_size"],
        seed=case["seed"],
        device=device,
        dense=dense,
    )
