"""Bad input of maps: one typed error each, saying what was got and what was expected."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.geometry.boxes import Box, ExtentError
from sparse_bridge.core.geometry.offsets import Offsets
from sparse_bridge.core.maps import coordinate_map
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.errors import (
    CoordinateError,
    DataTypeError,
    DeviceError,
    GeometryError,
    OverflowLimitError,
    ShapeError,
)
from tests.checks import assert_error
from tests.clouds import cloud

SHAPE, N = (9, 10), 50
COORDS = cloud(SHAPE, 2, 0.4)[:N]
OFFSETS = functional.kernel_offsets((3, 3))
CMAP = functional.coordinate_map(COORDS, SHAPE, 2)
X = torch.arange(2)


def bound(coords, shape=SHAPE, batch_size=2, **options):
    return functional.coordinate_map(coords, shape, batch_size, **options)


def coords_with(column, value):
    coords = COORDS.clone()
    coords[3, column] = value
    return coords


def lists(x_rows, y_rows):
    return functional.kernel_map([(torch.as_tensor(x_rows), torch.as_tensor(y_rows))], 3, 3)


CASES = {
    "maps of two dimensions": (
        ShapeError,
        ["of 2 and of 1 dimensions", "two maps"],
        lambda: functional.between(CMAP, functional.coordinate_map(COORDS[:, :2].contiguous()), OFFSETS),
    ),
    "a fractional stride": (GeometryError, ["1.5", "integers"], lambda: functional.strided(CMAP, OFFSETS, 1.5)),
    "a stride beyond 32 bits": (
        OverflowLimitError,
        [str(1 << 63), f"at most {(1 << 31) - 1}"],
        lambda: functional.strided(CMAP, OFFSETS, 1 << 63),
    ),
    "coordinates of rank 1": (ShapeError, ["[3]", "[N, 1 + D]"], lambda: bound(COORDS[0])),
    "coordinates without axes": (ShapeError, ["[50, 1]", "[N, 1 + D]"], lambda: bound(COORDS[:, :1])),
    "coordinates of another box": (ShapeError, ["[50, 3]", "[N, 2]"], lambda: CoordinateMap(COORDS, Box.grid(2, (9,)))),
    "int64 coordinates": (DataTypeError, ["torch.int64", "torch.int32"], lambda: bound(COORDS.long())),
    "float coordinates": (DataTypeError, ["torch.float32", ".int()"], lambda: CoordinateMap(COORDS.float(), CMAP.box)),
    "coordinates without values": (DeviceError, ["meta"], lambda: bound(COORDS.to("meta"))),
    "a map without values": (DeviceError, ["meta"], lambda: CoordinateMap(COORDS.to("meta"), CMAP.box)),
    "2^31 rows": (OverflowLimitError, [str(1 << 31)], lambda: CoordinateMap(COORDS[:1].expand(1 << 31, 3), CMAP.box)),
    "coordinate beyond the grid": (
        CoordinateError,
        ["axis 1", "is 10", "0 <= c < 10"],
        lambda: bound(coords_with(2, 10)),
    ),
    "negative coordinate": (CoordinateError, ["axis 0", "is -4", "0 <= c < 9"], lambda: bound(coords_with(1, -4))),
    "batch index >= batch_size": (
        CoordinateError,
        ["batch index", "is 2", "0 <= c < 2"],
        lambda: bound(coords_with(0, 2)),
    ),
    "negative batch index": (
        CoordinateError,
        ["batch index", "is -1", "0 or more"],
        lambda: functional.coordinate_map(coords_with(0, -1)),
    ),
    "batch size below zero": (GeometryError, ["-1", "0 or more"], lambda: bound(COORDS, SHAPE, -1)),
    "grid of another dimension": (GeometryError, ["[9, 10, 4]", "2"], lambda: bound(COORDS, (9, 10, 4))),
    "grid without cells": (GeometryError, ["[9, 0]", "at least 1"], lambda: bound(COORDS, (9, 0))),
    "outside": (CoordinateError, ["'drop'", "'ignore'"], lambda: bound(COORDS, outside="drop")),
    "grid of 2^62 cells": (
        OverflowLimitError,
        [str(1 << 62), "coarser grid"],
        lambda: bound(COORDS, (1 << 30, 1 << 30), 4),
    ),
    "axis of 2^31 cells": (
        OverflowLimitError,
        ["axis 0", str((1 << 31) + 9)],
        lambda: bound(COORDS, ((1 << 31) + 9, 10)),
    ),
    "box of negative extent": (ExtentError, ["axis 1", "-3"], lambda: Box.grid(2, (9, -3))),
    "hash table of 2^30 coordinates": (
        OverflowLimitError,
        [str(1 << 30), "Split the batch"],
        lambda: coordinate_map.capacity_for(1 << 30),
    ),
    "kernel that leaves no output": (
        GeometryError,
        ["[3, 3]", "[9, 2]", "[7, 0]", "at least one cell"],
        lambda: functional.conv_shape((9, 2), (3, 3)),
    ),
    "output grid without cells": (
        GeometryError,
        ["[4, 0]", "at least 1"],
        lambda: functional.strided(CMAP, OFFSETS, 2, (4, 0)),
    ),
    "kernel of another dimension": (
        GeometryError,
        ["3-dimensional", "2-dimensional"],
        lambda: functional.submanifold(CMAP, functional.kernel_offsets((3, 3, 3))),
    ),
    "strided kernel of another dimension": (
        GeometryError,
        ["1-dimensional", "2-dimensional"],
        lambda: functional.strided(CMAP, functional.kernel_offsets((3,)), 2),
    ),
    "generative kernel of another dimension": (
        GeometryError,
        ["1-dimensional", "2-dimensional"],
        lambda: functional.generative(CMAP, functional.kernel_offsets((3,)), 2),
    ),
    "stride 0": (GeometryError, ["[2, 0]", "at least 1"], lambda: functional.strided(CMAP, OFFSETS, (2, 0))),
    "strides of another dimension": (
        GeometryError,
        ["[1, 1, 1]", "2"],
        lambda: functional.between(CMAP, CMAP, OFFSETS, (1, 1, 1)),
    ),
    "kernel size 0": (GeometryError, ["[3, 0]", "at least 1"], lambda: functional.kernel_offsets((3, 0))),
    "kernel size without axes": (GeometryError, ["3", "per axis"], lambda: functional.kernel_offsets(3)),
    "dilation 0": (GeometryError, ["[0]", "at least 1"], lambda: functional.kernel_offsets((3,), dilation=0)),
    "no offsets": (GeometryError, ["[]", "[V, D]"], lambda: Offsets.of([])),
    "ragged offsets": (GeometryError, ["[[0], [0, 1]]", "[V, D]"], lambda: Offsets.of([[0], [0, 1]])),
    "repeated offsets": (GeometryError, ["[[0], [0]]", "offset of its own"], lambda: Offsets.of([[0], [0]])),
    "offsets beyond 32 bits": (
        OverflowLimitError,
        [str(1 << 31), "32-bit"],
        lambda: functional.kernel_offsets((3,), dilation=1 << 31),
    ),
    "outputs beyond 32 bits": (
        OverflowLimitError,
        ["axis 0", "32-bit"],
        lambda: functional.generative(CMAP, OFFSETS, 1 << 30),
    ),
    "a batch size of nothing": (CoordinateError, ["batch index", "batch_size is 0"], lambda: bound(COORDS, SHAPE, 0)),
    "batch size and grid exchanged": (GeometryError, ["(9, 10)", "whole number"], lambda: bound(COORDS, 2, SHAPE)),
    "no kernel size": (GeometryError, ["kernel_size is None", "per axis"], lambda: functional.kernel_offsets(None)),
    "no grid": (GeometryError, ["spatial_shape is None", "per axis"], lambda: functional.conv_shape(None, 3)),
    "a box of a number": (GeometryError, ["size 1", "two tuples"], lambda: Box.of((8, 8, 8), 1)),
    "a box of lists": (GeometryError, ["[0, 0]", "two tuples"], lambda: Box.of([0, 0], [1, 2])),
    "a box of two lengths": (GeometryError, ["(1, 2, 3)", "two tuples"], lambda: Box.of((0, 0), (1, 2, 3))),
    "inverse of coordinates": (
        DataTypeError,
        ["kmap is CoordinateMap", "a KernelMap of a map builder"],
        lambda: functional.inverse(CMAP),
    ),
    "inverse of both results": (
        DataTypeError,
        ["kmap is tuple", "(coordinates, map); pass the second"],
        lambda: functional.inverse(functional.strided(CMAP, OFFSETS, 2)),
    ),
    "a tensor of pairs": (DataTypeError, ["pairs is Tensor", "list of"], lambda: functional.kernel_map(COORDS, 2, 3)),
    "rows without their partners": (DataTypeError, ["pairs is list"], lambda: functional.kernel_map([(COORDS,)], 2, 3)),
    "no count of rows": (GeometryError, ["n_in is None", "whole"], lambda: functional.kernel_map([(X, X)], None, 3)),
    "no pair lists": (GeometryError, ["empty", "at least one"], lambda: functional.kernel_map([], 3, 3)),
    "pair lists of two lengths": (ShapeError, ["[3]", "[2]", "[P]"], lambda: lists([0, 1, 2], [0, 1])),
    "pair lists of fp32": (DataTypeError, ["torch.float32", "int64"], lambda: lists([0.0], [1.0])),
    "pair lists elsewhere": (
        DeviceError,
        ["meta", "cpu"],
        lambda: lists([0], torch.ones(1, dtype=torch.int64, device="meta")),
    ),
    "an input row that is not there": (CoordinateError, ["input row 3", "row < 3"], lambda: lists([0, 3], [0, 1])),
    "an output row below zero": (CoordinateError, ["output row -1", "row < 3"], lambda: lists([0, 1], [0, -1])),
}

BUILDERS = {
    "submanifold": functional.submanifold,
    "strided": functional.strided,
    "generative": functional.generative,
    "between x": lambda cmap, offsets: functional.between(cmap, CMAP, offsets),
    "between y": lambda cmap, offsets: functional.between(CMAP, cmap, offsets),
}
MIXED_UP = {
    "a tensor": ["map is Tensor", "`coordinate_map`", lambda: (COORDS, OFFSETS)],
    "both results": ["map is tuple", "pass the first", lambda: (functional.strided(CMAP, OFFSETS), OFFSETS)],
    "a kernel size": ["offsets is tuple", "`kernel_offsets((3, 3, 3))`", lambda: (CMAP, (3, 3))],
    "a number": ["offsets is int", "`kernel_offsets", lambda: (CMAP, 3)],
    "exchanged": ["map is Offsets", "`coordinate_map`", lambda: (OFFSETS, CMAP)],
}


@pytest.mark.parametrize("mistake", MIXED_UP)
@pytest.mark.parametrize("builder", BUILDERS)
def test_arguments_of_another_kind(builder, mistake):
    *words, arguments = MIXED_UP[mistake]
    assert_error(lambda: BUILDERS[builder](*arguments()), DataTypeError, words)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    error, words, call = CASES[name]
    assert_error(call, error, words)


def test_good_input_passes():
    """The defaults above are sound: each case fails for its own reason only."""
    assert bound(COORDS).n_rows == N
    assert functional.strided(CMAP, OFFSETS, 2, (4, 5))[0].n_rows
    assert lists([0, 2], [1, 1]).n_out == 3


def test_no_room_for_wrapping():
    """Grids whose cells leave 32 bits: keys are wide enough, distant rows never meet."""
    far = torch.tensor([[0, 0, 0], [0, (1 << 30) - 1, (1 << 30) - 2]], dtype=torch.int32)
    kmap = functional.submanifold(bound(far, (1 << 30, 1 << 30), 1), OFFSETS)
    assert [len(kmap.pair_list(v)[0]) for v in range(9)] == [0, 0, 0, 0, 2, 0, 0, 0, 0]
