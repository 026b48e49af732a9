"""Neighbour tables and new coordinates against the reference; masks against the tables."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets, box_offsets
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.new_rows import count_owners, link_new_rows, number_new_rows, repeat_first
from sparse_bridge.kernels.runtime.parts import Part
from tests import oracle, reference
from tests.clouds import cloud
from tests.kernels.calls import find, geometry, insert, reach, target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

SHAPE = (9, 10)
BOX = Box.grid(2, SHAPE)
KERNELS = {1: (1, 1), 9: (3, 3), 32: (4, 8), 33: (3, 11), 65: (5, 13)}


def kernel(n_offsets):
    size = KERNELS[n_offsets]
    return box_offsets(size, (1, 1), tuple(k // 2 for k in size))


def triples(nbr):
    v, row = (nbr >= 0).nonzero(as_tuple=True)
    return set(zip(v.tolist(), nbr[v, row].tolist(), row.tolist(), strict=True))


def check_masks(mask, nbr):
    """Bit v % 32 of word v // 32 says whether the table has an entry there; no other bit is set."""
    n_offsets, n_rows = nbr.shape
    assert mask.shape == (-(-n_offsets // 32), n_rows) and mask.dtype == torch.int32
    bits = torch.zeros((mask.shape[0] * 32, n_rows), dtype=torch.bool)
    bits[:n_offsets] = (nbr >= 0).cpu()
    for word in range(mask.shape[0]):
        got = (mask[word].cpu()[None] >> torch.arange(32, dtype=torch.int32)[:, None]) & 1
        assert torch.equal(got.bool(), bits[word * 32 : (word + 1) * 32])


@pytest.mark.parametrize("n_offsets", KERNELS)
def test_look_up(kernel_lane, n_offsets):
    offsets, coords = kernel(n_offsets), cloud(SHAPE, 2, 0.3)
    table, _ = insert(kernel_lane, coords, BOX, 256)
    found = find(kernel_lane, table, len(coords), coords, BOX, offsets)
    want = reference.submanifold_pairs(coords, BOX, offsets.values)
    assert found.nbr.dtype == torch.int32 and triples(found.nbr) == oracle.pair_triples(want)
    check_masks(found.mask, found.nbr)


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 600, 640])
@pytest.mark.parametrize("columns", [2, 4])
def test_what_lies_behind_the_rows_in_use(kernel_lane, rows, columns):
    """The first row, so that bounds and batch items of the rows in use are those of all; zeros where none is."""
    coords = torch.randint(-99, 99, (640, columns), generator=torch.Generator().manual_seed(rows), dtype=torch.int32)
    own = coords.to(kernel_lane.device)
    last = torch.tensor([rows - 1], dtype=torch.int32, device=own.device)
    repeat_first(own, last, target_of(kernel_lane))
    coords[rows:] = coords[:1] if rows else 0
    assert torch.equal(own.cpu(), coords)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 32, 33, 64, 65])
def test_row_counts_around_the_block(kernel_lane, n):
    offsets, coords = kernel(9), cloud(SHAPE, 1, 1.0)[:n].contiguous()
    table, _ = insert(kernel_lane, coords, BOX, 256)
    found = find(kernel_lane, table, n, coords, BOX, offsets)
    want = reference.submanifold_pairs(coords, BOX, offsets.values)
    assert triples(found.nbr) == oracle.pair_triples(want)
    check_masks(found.mask, found.nbr)


def test_the_centre_is_every_row_itself(kernel_lane):
    """Dead rows too, and nothing else of theirs."""
    coords = cloud(SHAPE, 2, 0.4)
    coords[::5, 0] = 7
    table, slots = insert(kernel_lane, coords, BOX, 256)
    found = find(kernel_lane, table, len(coords), coords, BOX, kernel(9), 4, alive=slots[0])
    want = reference.submanifold_pairs(coords, BOX, kernel(9).values)
    assert triples(found.nbr) == oracle.pair_triples(want)
    assert found.nbr[4].tolist() == list(range(len(coords)))


def test_offsets_that_leave_the_box(kernel_lane):
    """Neighbours across a border are absent, never the cell where a row-major key would wrap to."""
    coords = torch.cartesian_prod(torch.arange(2), torch.arange(9), torch.arange(10)).int()
    offsets = Offsets.of([(0, 9), (0, -9), (8, 0), (-1, 1), (9, 0), (0, 10), (-20, 40)])
    table, _ = insert(kernel_lane, coords, BOX, 512)
    found = find(kernel_lane, table, len(coords), coords, BOX, offsets)
    want = reference.submanifold_pairs(coords, BOX, offsets.values)
    assert triples(found.nbr) == oracle.pair_triples(want)


@pytest.mark.parametrize("n_offsets", KERNELS)
def test_masks_of_a_given_table(kernel_lane, n_offsets):
    generator = torch.Generator().manual_seed(n_offsets)
    nbr = torch.randint(-3, 40, (n_offsets, 75), generator=generator).clamp(min=-1).int()
    made = NeighborTable(nbr.to(kernel_lane.device))
    check_masks(made.masks(target_of(kernel_lane)), nbr)
    assert made.masks(target_of(kernel_lane)) is made.mask


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 90])
@pytest.mark.parametrize("n_offsets", [1, 9, 33])
def test_new_coordinates(kernel_lane, n_offsets, n):
    """Numbered by the first row that reaches them, then by offset; both tables say the same."""
    lane, offsets = kernel_lane, kernel(n_offsets)
    coords = cloud(SHAPE, 1, 1.0, seed=n)[:n].contiguous()
    out_box = Box.grid(1, SHAPE)
    table, slots = insert(lane, coords, out_box, 512, offsets)
    owned = count_owners(table, slots, target_of(lane))
    _, _, overflow, last = table.flags.tolist()[:4]
    n_new = last + 1
    want = reference.generative_coords(coords, out_box, offsets.values, (1, 1), out_box)
    assert n_new == len(want) and overflow <= 0
    rows = reach(lane, coords, out_box, geometry(offsets, lane.device))
    new = number_new_rows(table, slots, owned, n_new, rows, target_of(lane))
    linked, scattered = link_new_rows(table, slots, n_new, rows, target_of(lane))
    assert torch.equal(new.cpu(), want)
    pairs = reference.find_pairs(want, out_box, coords, out_box, offsets.values, (1, 1))
    assert triples(linked.nbr) == oracle.pair_triples(pairs)
    assert triples(scattered.nbr) == {(v, j, i) for v, i, j in triples(linked.nbr)}
    assert scattered.nbr.shape == (n_offsets, n_new)
    check_masks(linked.mask, linked.nbr)
    found = find(lane, table, n_new, want, out_box)
    assert found.nbr[0].tolist() == list(range(n_new)), "the table maps keys to the new rows"


# Kernel, dilation, stride, and how many offsets the largest class of remainders has.
STRIDED = [
    ((3, 3), (1, 1), (2, 2), 4),
    ((3, 3), (1, 1), (3, 2), 2),
    ((2, 2), (1, 1), (2, 2), 1),
    ((3, 1), (1, 1), (2, 1), 2),
    ((3, 3), (2, 1), (2, 3), 3),
    ((5, 13), (1, 1), (2, 1), 39),
    ((1, 1), (1, 1), (4, 4), 1),
    ((3, 3), (4, 2), (4, 2), 9),
]


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize(("size", "dilation", "stride", "most"), STRIDED)
def test_strided_coordinates(kernel_lane, size, dilation, stride, most, link):
    """Only the offsets that lead to whole coordinates are looked at, and nothing else changes;
    below zero too."""
    lane, low = kernel_lane, (-4, -7)
    box = Box.of((0, *low), (1, *SHAPE))
    coords = cloud(SHAPE, 1, 0.6, seed=3)
    coords[:, 1:] += torch.tensor(low, dtype=torch.int32)
    offsets = box_offsets(size, dilation, (1, 2))
    kernel_geometry = geometry(offsets, lane.device, divisor=stride, sign=-1)
    assert kernel_geometry.n_row_offsets == most
    want = reference.strided_coords(coords, box, offsets.values, stride, box)
    table, slots = insert(lane, coords, box, 512, offsets, sign=-1, divisor=stride)
    assert slots.shape == (most, len(coords))
    owned = count_owners(table, slots, target_of(lane))
    _, _, overflow, last = table.flags.tolist()[:4]
    n_new = last + 1
    assert n_new == len(want) > 1 and overflow <= 0
    rows = reach(lane, coords, box, kernel_geometry)
    new = number_new_rows(table, slots, owned, n_new, rows, target_of(lane))
    assert torch.equal(new.cpu(), want)
    linked, scattered = link_new_rows(table, slots, n_new, rows, target_of(lane), link=link)
    pairs = oracle.pair_triples(reference.find_pairs(coords, box, want, box, offsets.values, stride))
    assert triples(scattered.nbr) == pairs and scattered.nbr.shape == (len(offsets), n_new)
    assert (linked is not None) == link
    if linked is not None:
        assert triples(linked.nbr) == {(v, j, i) for v, i, j in pairs}
        check_masks(linked.masks(target_of(lane)), linked.nbr)


def test_few_classes_only():
    """A list for every remainder is made where that is shorter, and the lists are short."""
    one = box_offsets((3,), (1,), (1,))
    assert geometry(one, "cpu", divisor=(1,)).class_offsets is None
    assert geometry(one, "cpu", divisor=(1 << 13,)).class_offsets is None
    assert geometry(one, "cpu", divisor=(2,), sign=-1).class_offsets.tolist() == [[1, -1], [0, 2]]
    assert geometry(one, "cpu", divisor=(2,)).class_offsets.tolist() == [[1, -1], [0, 2]]
    assert geometry(one, "cpu", divisor=(3,)).class_offsets.tolist() == [[1], [0], [2]]
    assert geometry(one, "cpu", divisor=(3,), sign=-1).class_offsets.tolist() == [[1], [2], [0]]


class _Reads(TorchDispatchMode):
    """Storages that torch reads."""

    def __init__(self):
        super().__init__()
        self.storages = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.storages |= {it.untyped_storage()._cdata for it in args if isinstance(it, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("splits", [1, 2])
def test_parts_hold_what_tiles_are_packed_from(kernel_lane, splits):
    """Masks in a memory of their own, which nobody has looked at."""
    device, target = kernel_lane.device, target_of(kernel_lane)
    offsets, coords = kernel(9), cloud(SHAPE, 2, 0.3)
    hashed, _ = insert(kernel_lane, coords, BOX, 256)
    found = find(kernel_lane, hashed, len(coords), coords, BOX, offsets)
    memory = torch.zeros(4096, dtype=torch.int32, device=device)
    memory[64 : 64 + found.mask.numel()] = found.mask.flatten()
    table = NeighborTable(found.nbr, Part(memory, 64, tuple(found.mask.shape)))
    table.masks(target, splits)
    held = {part.untyped_storage()._cdata for part in table.parts}
    with _Reads() as reads:
        masks = table.masks(target, splits)
    assert memory.untyped_storage()._cdata in held and reads.storages <= held
    assert masks.untyped_storage()._cdata in held
