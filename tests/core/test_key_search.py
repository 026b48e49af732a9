"""Keys of coordinates and look-ups by key or coordinate, on torch code and on kernels."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets, box_offsets
from sparse_bridge.core.maps import key_search
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.errors import DataTypeError, DeviceError, ShapeError
from tests.clouds import cloud

from .test_voxel import lanes, whole

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

KNOWN_KEYS = [
    ((0, 0, 0, 0), 947293587111810033, 5558979605539197941),
    ((0, 1, 0, 0), 323128323731756366, 4934814342159144266),
    ((0, 2, 3, 1), 849015939121114836, 4307780452941655767),
    ((1, 0, 0, 4), 948788887119483026, -5968740140521598824),
    ((-1, -2, 3, 0), 633509110313942177, -6284019917327139669),
]


@lanes
def test_known_keys(lane):
    rows = torch.tensor([row for row, _, _ in KNOWN_KEYS], dtype=torch.int32, device=lane.device)
    assert key_search.hash_rows(rows).tolist() == [folded for _, folded, _ in KNOWN_KEYS]
    assert key_search.hash_rows(rows, fold=False).tolist() == [plain for _, _, plain in KNOWN_KEYS]


@lanes
@pytest.mark.parametrize("first", [0, 1])
def test_shifted_keys(lane, first):
    rows = whole((300, 4), -50, 50, 14).int()
    shifts = whole((5, 3), -2, 3, 15).int()
    got = key_search.hash_rows(rows.to(lane.device), shifts.to(lane.device), first=first, fold=False)
    for k, shift in enumerate(shifts.tolist()):
        moved = rows.clone()
        moved[:, first : first + 3] += torch.tensor(shift, dtype=torch.int32)
        assert torch.equal(got[k].cpu(), key_search.hash_rows(moved, fold=False))


@lanes
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_find_keys(lane, dtype):
    """Any 64-bit values, the table's own marks and repeats included; the first of equal references
    is found."""
    odd = [0, -1, -2, 1, (1 << 63) - 1, -(1 << 63), 3, 3, -1, 1 << 40, (1 << 40) + 1]
    references = torch.cat([torch.tensor(odd), whole((150,), -40, 40, 16)])
    queries = torch.cat([torch.tensor(odd), whole((200,), -60, 60, 17)]).view(1, -1)
    first = {}
    for row, key in enumerate(references.tolist()):
        first.setdefault(key, row)
    want = [[first.get(key, -1) for key in queries[0].tolist()]]
    got = key_search.find_keys(queries.to(lane.device), references.to(lane.device), dtype)
    assert got.dtype == dtype and got.tolist() == want
    none = key_search.find_keys(queries.to(lane.device), references.to(lane.device)[:1])
    assert [place for place in none[0].tolist() if place >= 0] == [0] * queries[0].tolist().count(0)


@lanes
def test_find_rows(lane):
    """Coordinates around repeated queries; the first of equal rows answers, outside the box
    nothing does."""
    shape = (6, 5, 7)
    coords = cloud(shape, 2, 0.3, seed=18)
    coords = torch.cat([coords, coords[:4]])
    queries = torch.cat([whole((60, 1), 0, 3, 19), whole((60, 3), -3, 9, 20)], 1).int()
    queries = torch.cat([queries, queries[:7]])
    first = {}
    for row, site in enumerate(coords.tolist()):
        first.setdefault(tuple(site), row)
    for offsets, stride in (
        (box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0)), (1, 1, 1)),
        (Offsets.of([(0, 0, 0), (1, 0, -1), (-2, 1, 0)]), (2, 1, 3)),
    ):
        cmap = CoordinateMap(coords.to(lane.device), Box.grid(2, shape))
        got = key_search.find_rows(cmap, queries.to(lane.device), offsets, stride).tolist()
        for v, offset in enumerate(offsets.values):
            for i, (b, *site) in enumerate(queries.tolist()):
                at = (b, *(c * s + o for c, s, o in zip(site, stride, offset, strict=True)))
                assert got[v][i] == first.get(at, -1)


@lanes
def test_nothing_to_find(lane):
    none = torch.zeros(0, dtype=torch.int64, device=lane.device)
    rows = torch.zeros(0, 4, dtype=torch.int32, device=lane.device)
    assert key_search.hash_rows(rows).shape == (0,)
    assert key_search.hash_rows(rows, rows[:, :3]).shape == (0, 0)
    assert key_search.find_keys(none, none).shape == (0,)
    assert key_search.find_keys(none[:0].new_zeros(2), none).tolist() == [-1, -1]
    zero = Offsets.of([(0, 0, 0)])
    cmap = CoordinateMap(rows, Box.grid(1, (2, 2, 2)))
    assert key_search.find_rows(cmap, rows, zero, (1, 1, 1)).shape == (1, 0)
    one = rows.new_zeros((2, 4))
    assert key_search.find_rows(cmap, one, zero, (1, 1, 1)).tolist() == [[-1, -1]]


def test_bad_input():
    one = torch.ones(4, dtype=torch.int64)
    with pytest.raises(DataTypeError, match=r"int64; expected int32"):
        key_search.hash_rows(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"offsets \[2, 4\]"):
        coords = torch.zeros(2, 4, dtype=torch.int32)
        key_search.hash_rows(coords, coords)
    with pytest.raises(DataTypeError, match=r"queries are torch\.int32"):
        key_search.find_keys(torch.zeros(2, dtype=torch.int32), one)
    with pytest.raises(ShapeError, match=r"shape \[2, 2\]; expected \[R\]"):
        key_search.find_keys(one, one.view(2, 2))
    with pytest.raises(DeviceError, match="queries are on cpu"):
        key_search.find_keys(one, one.to("meta"))
    rows = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(DeviceError, match="offsets on meta"):
        key_search.hash_rows(rows, rows[:, :3].to("meta"))
    cmap = CoordinateMap(rows[:1], Box.grid(1, (2, 2, 2)))
    zero, one_step = Offsets.of([(0, 0, 0)]), (1, 1, 1)
    with pytest.raises(DataTypeError, match="int64"):
        key_search.find_rows(cmap, rows.long(), zero, one_step)
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        key_search.find_rows(cmap, rows[:, :3], zero, one_step)
    with pytest.raises(DeviceError, match="queries are on meta"):
        key_search.find_rows(cmap, rows.to("meta"), zero, one_step)
