"""Memory runs out somewhere inside a layer: what was there before stays usable, nothing half-built
is kept, and the next call gives the right answer."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.maps import map_cache
from tests import learnt
from tests.adapters.spconv import apis
from tests.clouds import cloud, features
from tests.quick import quick
from tests.robustness.networks import FRAMEWORKS, Scene, features_of, network, tensor_of
from tests.robustness.watch import RunsOut, collect, live_tensors

SHAPE = (4, 5, 4)
OFFSETS = functional.kernel_offsets((3, 3, 3))
SOME = 10  # places at which memory runs out where not every one is tried


@pytest.fixture
def full_scene():
    """Crowded enough for every way of ordering and merging pairs."""
    coords = cloud(SHAPE, 2, 0.85, seed=3)
    return Scene(coords, features(len(coords), 4), SHAPE, 2)


def places(made: int, every: bool) -> list[int]:
    """All of `made` places, or some of them, spread over the run, the first and last included."""
    if every:
        return list(range(made))
    return sorted({made * step // SOME for step in range(SOME)} | {made - 1})


def survives(start, work, every: bool, passes: bool = False) -> int:
    """Run `work(start())` with memory running out at place after place; returns how many there are.

    start: makes what outlives the failure.  work: -> tensors, the same bits whenever it succeeds.
    passes: it may get along with less memory instead of failing.
    """
    want = work(start())
    state = start()
    with RunsOut() as whole:
        again = work(state)
    bitwise(again, want)
    del state, again
    gc.collect()  # what other tests left is not to be counted
    stores, tensors = map_cache.count(), live_tensors()
    for place in places(whole.made, every):
        state = start()
        if passes:
            with contextlib.suppress(torch.OutOfMemoryError), RunsOut(place):
                bitwise(work(state), want)
        else:
            with pytest.raises(torch.OutOfMemoryError) as caught, RunsOut(place):
                work(state)
            caught.value.__traceback__ = None  # its frames hold tensors
            del caught
        bitwise(work(state), want)
        del state
    gc.collect()
    assert map_cache.count() <= stores, "map stores were left behind"
    assert live_tensors() <= tensors, "tensors were left behind"
    return whole.made


def bitwise(got, want):
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"result {number} differs"


def check_network(framework, scene, device, every, seen=False):
    """seen: scenes have gone before, so that maps are prefetched where kernels run."""
    torch.manual_seed(0)
    with sparse_bridge.enable(framework, optimize="fuse"):  # the layers themselves, time and again
        net = network(framework, 4, 6, device)
        there = Scene(scene.coords.to(device), scene.x.to(device), scene.shape, scene.batch_size)
        x = there.x.clone().requires_grad_()
        leaves = [x, *net.parameters()]

        def work(tensor):
            y = features_of(net(tensor))
            return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

        def start():
            learnt.forget()
            for _ in range(2 if seen else 0):
                work(tensor_of(framework, there, x))
            return tensor_of(framework, there, x)

        return survives(start, work, every, passes=seen)


@pytest.mark.parametrize("framework", quick(["spconv"], FRAMEWORKS))
def test_layers_of_a_framework(framework, full_scene):
    assert check_network(framework, full_scene, "cpu", every=False) > SOME


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_of_a_framework_at_every_place(framework, full_scene):
    assert check_network(framework, full_scene, "cpu", every=True) > SOME


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [False, True], ids=["first", "third"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_of_a_framework_on_a_gpu(framework, full_scene, seen):
    assert check_network(framework, full_scene, "cuda", every=True, seen=seen) > SOME


def core_work(coords, x, weight):
    """Every kind of map on the coordinates of `state`, kept as an adapter keeps them."""

    def work(store):
        kept = store.get("grid", lambda: functional.coordinate_map(coords, SHAPE, 2, outside="ignore"))
        same = store.get("same", lambda: functional.submanifold(kept, OFFSETS))
        coarse, down = store.get("down", lambda: functional.strided(kept, OFFSETS, 2))
        inner = store.get("inner", lambda: functional.submanifold(coarse, OFFSETS))
        _, up = store.get("up", lambda: functional.generative(coarse, OFFSETS, 2))
        back = store.get("back", lambda: functional.between(coarse, kept, OFFSETS))
        y = functional.conv(x, weight, None, same)
        y = functional.conv(y, weight, None, down)
        y = functional.conv(y, weight, None, inner)
        z = functional.conv(y, weight, None, up)
        y = functional.pool(y, inner, "max") + functional.pool(y, inner, "avg")
        y = functional.conv(y, weight, None, back)
        y = functional.conv(y, weight, None, functional.inverse(same))
        loss = y.square().mean() + z.square().mean()
        return [y.detach(), z.detach(), *torch.autograd.grad(loss, [x, weight])]

    return work


@pytest.mark.parametrize("repeat", quick([True], [False, True]))
def test_maps_and_convolutions(lane, repeat):
    """Plain tensors on every dataflow; rows that repeat and rows outside of the grid, too."""
    coords = cloud(SHAPE, 2, 0.85, seed=3)
    if repeat:
        lost = coords[:3] + torch.tensor([0, 9, 0, 0], dtype=torch.int32)
        coords = torch.cat([coords, coords[:9], lost])
    coords = coords.to(lane.device)
    x = features(len(coords), 4, device=lane.device).requires_grad_()
    weight = (features(27 * 4, 4, seed=2, device=lane.device) / 8).view(27, 4, 4)
    work = core_work(coords, x, weight.requires_grad_())
    every = lane.device != "cpu"
    assert survives(map_cache.MapStore, work, every) > SOME


@pytest.mark.slow
@pytest.mark.parametrize("repeat", [False, True], ids=["distinct", "repeated"])
def test_maps_and_convolutions_at_every_place(repeat):
    coords = cloud(SHAPE, 2, 0.85, seed=3)
    coords = torch.cat([coords, coords[:9]]) if repeat else coords
    x = features(len(coords), 4).requires_grad_()
    weight = (features(27 * 4, 4, seed=2) / 8).view(27, 4, 4).requires_grad_()
    assert survives(map_cache.MapStore, core_work(coords, x, weight), True) > SOME


def test_views_of_a_map(full_scene):
    """Pair lists and tables of both directions: made when first asked for."""

    def start():
        grid = functional.coordinate_map(full_scene.coords, SHAPE, 2)
        rulebook = functional.submanifold(grid, OFFSETS).rulebook
        assert rulebook.lists().starts[-1] > 0
        return rulebook

    def work(rulebook):
        tables = [rulebook.table(side)[0].nbr for side in (0, 1)]
        return [*tables, *rulebook.pair_list(3)]

    assert survives(start, work, every=True) > 2


def test_lazy_tables_of_a_record(full_scene):
    """What an spconv record shows is made when it is first asked for, all or nothing."""
    names = (
        "pair_fwd",
        "pair_bwd",
        "pair_mask_fwd_splits",
        "pair_mask_bwd_splits",
        "mask_argsort_fwd_splits",
        "mask_argsort_bwd_splits",
    )

    def work(record):
        found = [getattr(record, name) for name in names]
        assert len(record.masks) == 1
        return [one[0] if isinstance(one, list) else one for one in found]

    with apis.standin() as spconv:
        from spconv.core import ConvAlgo

        layer = spconv.SubMConv3d(4, 4, 3, indice_key="k", algo=ConvAlgo.MaskImplicitGemm)

        def start():
            y = layer(tensor_of("spconv", full_scene, full_scene.x))
            return y.find_indice_pair("k")

        assert survives(start, work, every=True) > 3


def test_a_hash_table_takes_all_keys_or_none():
    keys = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    old, new = keys[:10], keys[10:]
    with apis.standin():
        from spconv.pytorch.hash import HashTable

        def filled():
            table = HashTable(torch.device("cpu"), torch.int64, torch.int64)
            table.insert(old, old)
            return table

        table = filled()
        with RunsOut() as whole:
            table.insert(new, new)
        assert whole.made > 3
        for place in range(whole.made):
            table = filled()
            with pytest.raises(torch.OutOfMemoryError), RunsOut(place):
                table.insert(new, new)
            assert len(table) == len(old)
            found, absent = table.query(keys)
            assert torch.equal(found[:10], old)
            assert absent.tolist() == [False] * len(old) + [True] * len(new)
            table.insert(new, new)
            found, absent = table.query(keys)
            assert torch.equal(found, keys) and not absent.any()


@pytest.mark.gpu
@pytest.mark.parametrize("flow", ["masked", "unmasked", "per_offset"])
def test_a_gpu_that_is_full(flow):
    """The allocator itself refuses, with less or more memory left."""
    shape = (48, 48, 48)
    coords = cloud(shape, 2, 0.4, seed=1, device="cuda")
    x = features(len(coords), 64, device="cuda").requires_grad_()
    weight = torch.randn(27, 64, 64, device="cuda").div_(40).requires_grad_()

    def work(store):
        grid = store.get("grid", lambda: functional.coordinate_map(coords, shape, 2))
        same = store.get("same", lambda: functional.submanifold(grid, OFFSETS))
        _, down = store.get("down", lambda: functional.strided(grid, OFFSETS, 2))
        y = functional.conv(functional.conv(x, weight, None, same), weight, None, down)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, weight])]

    with settings.override(dataflow=flow):
        want = work(map_cache.MapStore())
        torch.cuda.synchronize()
        total, refused = torch.cuda.mem_get_info()[1], 0
        ballast = filled_holes(total)
        held = torch.cuda.memory_allocated()
        for extra in range(0, 512 << 20, 16 << 20):
            store = map_cache.MapStore()
            torch.cuda.empty_cache()
            limit = (torch.cuda.memory_reserved() + extra) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit))
            try:
                bitwise(work(store), want)
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None
                refused += 1
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            bitwise(work(store), want)
            del store
            collect()
            torch.cuda.synchronize()
            # Small caches of the process (bounds of boxes, libraries' workspaces) may be new.
            assert torch.cuda.memory_allocated() <= held + (1 << 20), f"kept after {extra} bytes"
        assert refused, "memory never ran out"
        del ballast


def filled_holes(total: int) -> list[torch.Tensor]:
    """What takes the memory that the allocator holds and nobody uses: after other tests it may be
    enough for everything."""
    collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    found = []
    try:
        for size in (64 << 20, 4 << 20, 1 << 20):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    found.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found
