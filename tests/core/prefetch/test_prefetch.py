"""Prefetched maps are the maps that would have been built one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.device.device_support import kernel_target
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.maps import map_builder, map_cache, request
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.prefetch import input_memory, prefetch
from sparse_bridge.kernels.maps import tile_batch
from sparse_bridge.kernels.runtime import launch
from tests.clouds import cloud, features

pytestmark = [pytest.mark.emulated, pytest.mark.interpreted]

SHAPE = (12, 10, 14)
THREE = functional.kernel_offsets((3, 3, 3))
DOWN = functional.kernel_offsets((3, 3, 3), padding=(1, 1, 1))
PAIR = functional.kernel_offsets((2, 2, 2), padding=(0, 0, 0))


@pytest.fixture(autouse=True)
def fresh(built):
    """Prefetch answers, and has learnt nothing; what is built when it is asked for is counted."""
    before = request.registered()
    request.register(prefetch.provide, before[1])
    prefetch.forget()
    Scene.kinds = built
    yield
    prefetch.forget()
    request.register(*before)


@dataclasses.dataclass(frozen=True)
class Cells:
    """A rule for outputs: half the grid, rounded up."""

    def output_box(self, box):
        return Box.grid(box.size[0], [-(-extent // 2) for extent in box.size[1:]])


class Scene:
    """A scene whose maps are asked for as an adapter asks, and compared with those built alone.

    kinds: of all maps that are built one by one.
    """

    kinds: list

    def __init__(self, coords, both=True, shape=SHAPE):
        self.both, self.shape = both, shape
        self.root = CoordinateMap(coords, Box.grid(2, shape)), map_cache.MapStore()
        self.built = 0

    def ask(self, level, *question):
        cmap, store = level
        before = len(self.kinds)
        found = request.request(store, cmap, request.MapRequest(*question))
        self.built += len(self.kinds) - before
        return found

    def submanifold(self, level, offsets=THREE):
        cmap = level[0]
        kmap = self.ask(level, "submanifold", offsets).kmap
        alone = CoordinateMap(cmap.coords.clone(), cmap.box)
        same(kmap, map_builder.submanifold(alone, offsets), self.both)
        return kmap

    def strided(self, level, rule=None, offsets=DOWN, order="first_seen"):
        cmap, stride = level[0], (2, 2, 2)
        rule = Cells() if rule is None else rule
        box = rule if isinstance(rule, Box) else rule.output_box(cmap.box)
        kmap, new, store = self.ask(level, "strided", offsets, stride, rule, order)
        alone = CoordinateMap(cmap.coords.clone(), cmap.box)
        expected, other = map_builder.strided(alone, offsets, stride, box, order)
        assert torch.equal(new.coords, expected.coords) and new.box is expected.box
        same(kmap, other, self.both)
        return new, store

    def network(self):
        """Two levels down, with a map of its own at each; returns how many were built alone."""
        self.submanifold(self.root)
        half = self.strided(self.root)
        self.submanifold(half)
        self.submanifold(half, PAIR)
        self.strided(half, offsets=PAIR)
        return self.built


def same(found, expected, both):
    """Products through tiles in one direction, or in both and the pairs, to the last bit."""
    assert (found.n_in, found.n_out) == (expected.n_in, expected.n_out)
    n_offsets, device = found.n_offsets, found.device
    # Whole numbers, so that sums are exact in any order: equal rows go through atomics on a GPU.
    weight = features(n_offsets * 8, 16, seed=3).mul(4).round().view(n_offsets, 8, 16).to(device)
    back = weight.transpose(1, 2).contiguous()
    for kmap, other, w in ((found, expected, weight), (found.transposed(), expected.transposed(), back))[: 1 + both]:
        x = features(kmap.n_in, w.shape[1], seed=kmap.n_in).mul(4).round().to(device)
        mine, theirs = (functional.conv(x, w, None, one) for one in (kmap, other))
        assert torch.equal(mine, theirs)
    if both and expected.rulebook.regular:
        target = kernel_target(found.device)
        mine, theirs = (one.rulebook.device_pairs(target) for one in (found, expected))
        for name in ("in_rows", "out_rows", "starts"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for v in range(n_offsets if both else 0):
        mine, theirs = sorted_pairs(found, v), sorted_pairs(expected, v)
        assert torch.equal(mine, theirs)


def sorted_pairs(kmap, v):
    pairs = torch.stack(kmap.pair_list(v), 1).cpu()
    return pairs[torch.argsort(pairs[:, 0] * (kmap.n_out + 1) + pairs[:, 1])]


def scene(lane, seed, share=0.2, both=True, **kwargs):
    return Scene(cloud(SHAPE, share=share, seed=seed, device=lane.device, **kwargs), both)


def taught(lane):
    """After two scenes, which are a history."""
    assert [scene(lane, seed).network() for seed in (1, 2)] == [5, 5]


def test_the_third_scene_is_prefetched(kernel_lane):
    taught(kernel_lane)
    for seed in (3, 4):
        assert scene(kernel_lane, seed, share=0.19 + 0.01 * seed).network() == 0


@dataclasses.dataclass(frozen=True)
class Halved:
    """A rule for outputs, as of a framework that has no grid: the cells of the input's bounds."""

    def output_box(self, box):
        ends = [low + extent - 1 for low, extent in zip(box.lo, box.size, strict=True)]
        lo = (box.lo[0], *(low // 2 for low in box.lo[1:]))
        hi = (ends[0], *(end // 2 for end in ends[1:]))
        return Box.spanning(lo, tuple(h - low + 1 for low, h in zip(lo, hi, strict=True)))


class Loose(Scene):
    """Sorted levels inside bounds of the data, and maps between given rows."""

    def __init__(self, coords, both=True, order="sorted"):
        super().__init__(coords, both)
        self.order = order
        lo, hi = (tuple(bound) for bound in torch.stack(coords.aminmax(dim=0)).tolist())
        box = Box.spanning(lo, tuple(h - low + 1 for low, h in zip(lo, hi, strict=True)))
        self.root = CoordinateMap(coords, box), map_cache.MapStore()

    def sorted(self, level):
        return self.strided(level, Halved(), PAIR, self.order)

    def between(self, fine, coarse):
        kmap = self.ask(fine, "between", THREE, (2, 2, 2), coarse[0]).kmap
        x, y = (CoordinateMap(level[0].coords.clone(), level[0].box) for level in (fine, coarse))
        same(kmap, map_builder.between(x, y, THREE, (2, 2, 2)), self.both)

    def network(self):
        self.submanifold(self.root)
        half = self.sorted(self.root)
        self.between(self.root, half)
        self.submanifold(half)
        self.between(half, self.sorted(half))
        return self.built


@pytest.mark.parametrize("order", ["sorted", "ascending"])
@pytest.mark.parametrize("both", [False, True])
def test_bounds_of_the_data_do_not_matter(kernel_lane, both, order):
    """What repeats is the list of requests; every scene lies elsewhere."""
    built = []
    for seed in (1, 2, 3, 4):
        coords = cloud(SHAPE, share=0.2, seed=seed)
        coords = coords[(coords[:, 1] < 12 - seed) & (coords[:, 3] >= seed)]
        coords[:, 1:] += torch.tensor([seed - 2, -7 * seed, 3], dtype=torch.int32)
        built.append(Loose(coords.contiguous().to(kernel_lane.device), both, order).network())
    assert built[:2] == [6, 6] and built[-1] == 0


def test_training_after_inference(kernel_lane):
    """What inference did not ask for is not kept, and made when somebody asks."""
    for seed in (1, 2, 3):
        built = scene(kernel_lane, seed, both=False).network()
    assert built == 0
    assert scene(kernel_lane, 4, both=True).network() == 0
    assert scene(kernel_lane, 5, both=True).network() == 0


def test_a_scene_that_outgrows_the_estimate(kernel_lane):
    """Sparse scenes grow more from level to level than dense ones do."""
    for seed in (1, 2):
        scene(kernel_lane, seed, share=0.9).network()
    outgrown = scene(kernel_lane, 3, share=0.9)
    (last,) = prefetch._newest.values()
    last.rows, last.n_rows, last.largest = dict.fromkeys(last.rows, 1), 1 << 20, {}
    assert outgrown.network() == 5
    attempts = last.next_expectation.attempts
    assert attempts.failures == 1 and attempts.wait == 2


@pytest.mark.parametrize("spoil", ["equal", "outside"])
def test_equal_and_outlying_rows(kernel_lane, spoil):
    taught(kernel_lane)
    coords = cloud(SHAPE, share=0.2, seed=3)
    coords[5] = coords[9] if spoil == "equal" else torch.tensor([0, 0, 10, 0], dtype=torch.int32)
    spoiled = Scene(coords.to(kernel_lane.device))
    assert spoiled.network() == 5
    for seed in (4, 5):  # two scenes pass before the next attempt
        assert scene(kernel_lane, seed).network() == 5
    assert scene(kernel_lane, 6).network() == 0


def test_another_order_of_questions(kernel_lane):
    taught(kernel_lane)
    other = scene(kernel_lane, 3)
    other.submanifold(other.root)
    half = other.strided(other.root, Box.grid(2, (3, 3, 4)))
    other.submanifold(half)
    assert other.built == 2, "only the first question was expected"
    assert scene(kernel_lane, 4).network() == 5, "one scene of a kind is no history"


@pytest.mark.gpu
def test_another_stream_builds_its_own():
    for seed in (1, 2):
        Scene(cloud(SHAPE, share=0.2, seed=seed, device="cuda")).network()
    branched = Scene(cloud(SHAPE, share=0.2, seed=3, device="cuda"))
    branched.submanifold(branched.root)
    assert branched.built == 0
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        branched.strided(branched.root)
    torch.cuda.synchronize()
    assert branched.built == 1


def test_the_switch(kernel_lane):
    with settings.override(capture="off"):
        for seed in (1, 2, 3):
            assert scene(kernel_lane, seed).network() == 5


def test_levels_that_were_counted_otherwise(kernel_lane):
    """Two branches end on grids of one shape; a question more, and the numbers of the levels name
    the other branch."""

    def branches(here, more):
        here.submanifold(here.root)
        if more:
            here.submanifold(here.root, PAIR)
        wide = here.strided(here.root)
        if not more:
            here.submanifold(here.strided(here.root, offsets=PAIR))
        here.submanifold(wide)
        return here.built

    assert [branches(scene(kernel_lane, seed), False) for seed in (1, 2, 3)] == [5, 5, 0]
    assert branches(scene(kernel_lane, 4), True) >= 1  # every map is compared with its own


def test_memory_for_all_levels_at_once_is_not_there(kernel_lane, monkeypatch):
    taught(kernel_lane)

    def full(self):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prefetch.BatchedBuilder, "build", full)
    assert scene(kernel_lane, 3).network() == 5


def test_empty_items_and_few_rows(kernel_lane):
    for seed in (1, 2, 3):
        built = scene(kernel_lane, seed, empty_items=(seed % 2,)).network()
    assert built == 0
    coords = cloud(SHAPE, share=0.2, seed=3)[:1].contiguous().to(kernel_lane.device)
    assert Scene(coords).network() == 0


def test_a_lone_map(kernel_lane):
    """Nothing would be queued with it."""
    for seed in (1, 2, 3, 4):
        here = scene(kernel_lane, seed)
        here.submanifold(here.root)
        assert here.built == 1
    assert prefetch.counts()["prefetched"] == 0


def test_all_maps_of_a_scene_are_packed_in_one_launch(kernel_lane, monkeypatch):
    taught(kernel_lane)
    names, own = [], launch.Kernel.launch

    def launched(self, *args):
        names.append(self.name)
        return own(self, *args)

    third = scene(kernel_lane, 3)
    monkeypatch.setattr(launch.Kernel, "launch", launched)
    third.ask(third.root, "submanifold", THREE)
    assert third.built == 0
    assert names.count("tiles_each") == 1 and "pack_tiles" not in names


def test_large_tables_are_packed_in_several_batches(kernel_lane, rules, monkeypatch):
    """What goes when tiles are there makes room for the next ones; the maps are the same."""
    taught(kernel_lane)
    third, sizes, own = scene(kernel_lane, 3), [], tile_batch.tile_batch

    def packed(tables, target):
        sizes.append(len(tables))
        return own(tables, target)

    rules.set(input_memory, BATCH=27 * third.root[0].n_rows + 1)
    monkeypatch.setattr(tile_batch, "tile_batch", packed)
    assert third.network() == 0
    assert len(sizes) > 2 and sum(sizes) >= 5
