"""How long maps live: as long as the coordinates they belong to, and never longer."""

from __future__ import annotations

import gc
import threading
import types
import weakref

import pytest
import torch

from sparse_bridge.adapters.torchsparse import equal_rows
from sparse_bridge.core import functional
from sparse_bridge.core.maps import map_cache
from tests.clouds import cloud

OFFSETS = functional.kernel_offsets((3, 3))


def build(coords):
    return functional.submanifold(functional.coordinate_map(coords, (9, 10), 2), OFFSETS)


def map_of(coords):
    """The submanifold map of a coordinate tensor, through its store."""
    store = map_cache.store_of(coords)
    return store, store.get("submanifold", lambda: build(coords))


@pytest.fixture(autouse=True)
def no_collector():
    """References alone must do: a cycle would keep GPU memory until the collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_layers_that_see_one_tensor_share_its_maps():
    coords = cloud((9, 10))
    store, kmap = map_of(coords)
    again, same = map_of(coords)
    assert again is store and same is kmap
    assert map_of(coords.clone())[1] is not kmap


def test_maps_of_a_users_tensor_die_with_their_last_use():
    """A data set held in memory does not keep maps alive."""
    coords = cloud((9, 10))
    store, kmap = map_of(coords)
    gone = weakref.ref(store), weakref.ref(kmap), weakref.ref(kmap.rulebook)
    del store, kmap
    assert [ref() for ref in gone] == [None, None, None]
    assert len(coords)


def test_maps_of_our_own_tensor_die_with_it():
    coords = cloud((9, 10))
    store = map_cache.MapStore()
    map_cache.adopt(coords, store)
    kmap = map_of(coords)[1]
    gone, count = weakref.ref(kmap), map_cache.count()
    del store, kmap
    assert map_of(coords)[1] is gone()
    del coords
    assert gone() is None and map_cache.count() < count


def test_an_alias_keeps_the_store_and_the_user_tensor_does_not():
    coords = cloud((9, 10))
    store, kmap = map_of(coords)
    alias = store.alias(coords)
    assert alias is not coords and alias.data_ptr() == coords.data_ptr()
    assert store.alias(coords) is alias, "one alias serves all layers while it lives"
    gone = weakref.ref(kmap)
    del store, kmap
    assert map_of(alias)[1] is gone() and map_of(coords)[1] is gone()
    del alias
    assert gone() is None


def test_coordinates_changed_in_place_get_new_maps():
    coords = cloud((9, 10))
    store, kmap = map_of(coords)
    before = kmap.pair_list(0)[0].clone()
    coords[:, 1] = (coords[:, 1] + 3) % 9
    new_store, new_map = map_of(coords)
    assert new_store is not store and new_map is not kmap
    assert map_of(coords)[0] is new_store
    want = build(coords.clone())
    for v in range(9):
        assert torch.equal(new_map.pair_list(v)[0], want.pair_list(v)[0])
    assert torch.equal(kmap.pair_list(0)[0], before), "the old map is immutable"


def test_what_users_wrote_to_is_built_again():
    store, builds = map_cache.MapStore(), []

    def build():
        builds.append(torch.zeros(3))
        return builds[-1], "map"

    def get():
        return store.get("key", build, lambda made: made[0])

    first = get()
    assert get() is first and store.peek("key") is first
    first[0].detach()[1] = 5  # as users do through an output that shares its memory
    assert store.peek("key") is None
    second = get()
    assert second is not first and second[0].tolist() == [0, 0, 0] and get() is second
    with torch.inference_mode():
        store.get("other", lambda: (torch.zeros(2), ""), lambda made: made[0])
        assert store.peek("other") is not None  # of which users get copies


@pytest.mark.parametrize("change", ["resize", "set"])
def test_coordinates_whose_memory_was_exchanged_get_new_maps(change):
    coords = cloud((9, 10))
    store = map_of(coords)[0]
    if change == "resize":
        coords.resize_(len(coords) - 3, 3)
    else:
        coords.set_(cloud((9, 10), seed=1)[: len(coords)].contiguous())
    assert map_of(coords)[0] is not store


def test_changes_of_inference_tensors_cannot_be_seen_so_nothing_is_kept():
    with torch.inference_mode():
        coords = cloud((9, 10)).clone()
    assert coords.is_inference()
    store = map_cache.store_of(coords)
    assert map_cache.store_of(coords) is not store
    alias = store.alias(coords)
    assert not alias.is_inference() and map_cache.store_of(alias) is store


def test_maps_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        coords = map_cache.normal_tensor(lambda: cloud((9, 10)).clone())
        assert not coords.is_inference()
        map_cache.adopt(coords, map_cache.MapStore())
        kmap = map_of(coords)[1]
    assert map_of(coords)[1] is kmap
    x = torch.randn(len(coords), 4, requires_grad=True)
    functional.conv(x, torch.randn(9, 4, 4), None, kmap).sum().backward()
    assert x.grad.abs().sum() > 0


def step(coords):
    """A submanifold layer, a strided one and its inverse, kept as an adapter keeps them."""
    store, same = map_of(coords)
    alias = store.alias(coords)

    def down():
        cmap = functional.coordinate_map(coords, (9, 10), 2)
        coarse, kmap = functional.strided(cmap, OFFSETS, 2, (5, 5))
        map_cache.adopt(coarse.coords, map_cache.MapStore())
        return coarse.coords, kmap

    coarse, kmap = store.get("strided", down)
    x = torch.randn(len(coords), 4, requires_grad=True)
    weight = torch.randn(9, 4, 4, requires_grad=True)
    x1 = functional.conv(x, weight, None, same)
    x2 = functional.conv(x1, weight, None, kmap)
    x3 = functional.conv(x2, weight, None, functional.inverse(kmap))
    functional.pool(x3, kmap, "max").sum().backward()
    return [weakref.ref(one) for one in (store, same, kmap, same.rulebook, alias, coarse)]


def test_no_growth_over_iterations():
    """New coordinates every step, as in training: what a step built is gone when it ends."""
    coords = cloud((9, 10))
    step(coords)
    alive = map_cache.count()
    for seed in range(200):
        made = step(cloud((9, 10), seed=seed))
        assert [ref() for ref in made] == [None] * len(made), f"step {seed} left something behind"
        assert map_cache.count() == alive
    kept = step(coords)  # the same coordinates again and again leave nothing either
    assert [ref() for ref in kept] == [None] * len(kept)


def test_the_first_of_several_threads_builds():
    coords, built, maps = cloud((9, 10)), [], []
    store = map_cache.store_of(coords)
    barrier = threading.Barrier(8)

    def make():
        built.append(threading.get_ident())
        return build(coords)

    def work():
        barrier.wait()
        maps.append(store.get("submanifold", make))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(maps) == 8 and len(set(map(id, maps))) == 1


def test_a_build_that_fails_is_tried_again():
    store = map_cache.MapStore()

    def fail():
        raise RuntimeError("first try")

    with pytest.raises(RuntimeError, match="first try"):
        store.get("key", fail)
    assert store.get("key", lambda: 7) == 7


@pytest.mark.parametrize("halved", [False, True])
def test_maps_of_equal_rows_die_with_their_last_use(halved):
    """With what was made of them for layers of torchsparse, and for gradients."""
    coords = cloud((9, 10))
    coords[3] = coords[1]
    store, kmap = map_of(coords)
    layer = types.SimpleNamespace(halved=True)
    used = equal_rows.among_themselves(kmap, layer) if halved else kmap
    assert not halved or equal_rows.among_themselves(kmap, layer) is used is not kmap
    x, weight = torch.randn(len(coords), 2, requires_grad=True), torch.randn(len(OFFSETS), 2, 3, requires_grad=True)
    functional.conv(x, weight, None, used).square().sum().backward()
    back = used.rulebook.backward
    gone = [weakref.ref(one) for one in (kmap.rulebook, used.rulebook, back.distinct, back.rulebook)]
    del store, kmap, back, used
    assert [ref() for ref in gone] == [None] * len(gone)
