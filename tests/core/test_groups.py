"""Layers that share a map: which dataflows are the cheapest together, and what is kept of that."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from sparse_bridge.core.conv.choice import flow_of, layer_of, map_class_of, serving_flow, used_groups
from sparse_bridge.core.conv.dataflow import LayerProduct
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps.rows import Rows
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.core.tuning import tuner
from sparse_bridge.core.tuning.groups import GroupTable, GroupWinner, Layer, MapClass, choose
from sparse_bridge.core.tuning.kernel_hash import code_hash
from sparse_bridge.core.tuning.tune_cache import CacheFileError, Stamp, TuneCache, decode, encode
from sparse_bridge.core.tuning.tuner import Tuner
from tests.core.tuning import CPU, H200, STAMP, never, tuning

A, B = Layer("fwd", 0, 64, 64), Layer("fwd", 0, 64, 128)
BACK = Layer("dgrad", 1, 64, 64)
TILES, PAIRS, GROUPED = ("tiles", 0), ("pairs", 0), ("grouped", 0)
COSTS = {TILES: 20e-6, PAIRS: 30e-6, GROUPED: 10e-6}
TIMES = {"masked": 10e-6, "unmasked": 18e-6, "grouped": 9e-6}


def needs(layer, flow):
    found = {"unmasked": (), "masked": (TILES,), "grouped": (TILES, PAIRS, GROUPED)}
    return frozenset(found[flow])


def best(layers, times=None, paid=()):
    times = times or dict.fromkeys(layers, TIMES)
    flows, seconds = choose(layers, times, needs, COSTS, frozenset(paid))
    return flows, pytest.approx(1e6 * seconds)


@pytest.mark.parametrize(
    "layers, paid, flows, microseconds",
    [
        ({A: 1}, (), "unmasked", 18),
        ({A: 2}, (), "unmasked", 36),
        ({A: 3}, (), "masked", 50),
        ({A: 1}, (TILES,), "masked", 30),
        ({A: 1}, (TILES, PAIRS), "masked", 60),
        ({A: 11}, (TILES, PAIRS), "grouped", 159),
    ],
)
def test_what_a_map_needs_is_paid_once_and_by_all(layers, paid, flows, microseconds):
    assert best(layers, paid=paid) == ({A: flows}, microseconds)


def test_layers_of_one_map_are_decided_together():
    """Alone each of two layers would stay unsorted, and one with many partners never does."""
    one, other = {A: 1}, {B: 2}
    assert {*best(one)[0].values(), *best(other)[0].values()} == {"unmasked"}
    assert best({A: 1, B: 2}) == ({A: "masked", B: "masked"}, 50)
    times = {A: TIMES, B: {"masked": 50e-6, "unmasked": 18e-6}}
    assert best({A: 5, B: 1}, times)[0] == {A: "masked", B: "unmasked"}
    assert best({A: 2, BACK: 2}, {A: TIMES, BACK: TIMES})[0] == {A: "masked", BACK: "masked"}


def test_views_that_were_not_timed_are_not_taken():
    flows, _ = choose({A: 9}, {A: TIMES}, needs, {}, frozenset())
    assert flows == {A: "unmasked"}


def rulebook(n_rows=20_000, symmetric=True, trained=False, count=None):
    rows = Rows(n_rows if count is None else None, count, n_rows)
    book = Rulebook(rows, rows, 27, CPU, symmetric=symmetric)
    book.trained = trained
    return book


def product(c_in=64, c_out=64, dtype=torch.float16):
    w = layout_of(torch.empty(27, c_in, c_out, device="meta"), "vio")
    return LayerProduct(H200, CPU, dtype, "ieee", w)


def group(flow="unmasked", layers=None, book=None, **changes):
    """A winner for layers over a map like `rulebook()`."""
    layers = {str(A): 4} if layers is None else layers
    map_class = str(map_class_of(book or rulebook(), product()))
    flows = dict.fromkeys(layers, flow) if flow else {}
    made = GroupWinner(map_class, layers, flows, 90.0, 100.0, 6, code_hash())
    return dataclasses.replace(made, **changes)


def kept(place, *winners):
    for one in winners:
        assert TuneCache(place, Stamp.of(CPU, H200)).store_group(one)


def served(book=None, side=0, one=None):
    """(the dataflow in a process that has just begun, by rule)."""
    book, one = book or rulebook(), one or product()
    with tuner.use(Tuner(never)):
        return serving_flow(book, side, one), flow_of(book, side, one)


def test_classes_tell_maps_apart():
    maps = [rulebook(), rulebook(symmetric=False), rulebook(trained=True), rulebook(10**6)]
    classes = {str(map_class_of(book, product())) for book in maps}
    classes |= {str(map_class_of(maps[0], product(dtype=torch.bfloat16)))}
    assert len(classes) == 5
    assert str(map_class_of(maps[0], product())) == "submanifold/v27/float16/ieee/inference/r8:8"
    assert str(layer_of(1, product(32)._replace(w=product(32).w.transposed()))) == ("dgrad1:64x32/g1")


def test_a_stored_winner_serves_a_later_process(tmp_path):
    kept(tmp_path, group())
    with tuning("cached", tmp_path):
        assert served() == ("unmasked", "masked")
        assert served(rulebook(40_000)) == ("unmasked", "masked"), "an octave away"
        for book in (rulebook(200_000), rulebook(trained=True), rulebook(symmetric=False)):
            found, rule = served(book)
            assert found == rule
        assert served(one=product(64, 128)) == ("masked", "masked"), "no layer of the group"
        padded = rulebook(count=torch.zeros(1, dtype=torch.int32))
        assert served(padded) == ("masked", "masked")
    with tuning("off", tmp_path):
        assert served() == ("masked", "masked")


def test_a_winner_that_keeps_the_rules_changes_nothing(tmp_path):
    kept(tmp_path, group(flow=""))
    with tuning("cached", tmp_path):
        assert served() == ("masked", "masked")


def test_groups_that_disagree_leave_it_to_the_rules(tmp_path):
    kept(tmp_path, group(), group("grouped", {str(A): 4, str(B): 1}))
    with tuning("cached", tmp_path):
        assert served() == ("masked", "masked")
        assert served(one=product(64, 128)) == ("grouped", "masked")
    kept(tmp_path, group("grouped"))
    with tuning("cached", tmp_path):
        assert served() == ("grouped", "masked"), "a later winner of the same group"


def test_stale_and_foreign_winners_are_ignored(tmp_path):
    kept(tmp_path, group(code="0123456789abcdef"))
    with tuning("cached", tmp_path):
        assert served() == ("masked", "masked")
    foreign = TuneCache(tmp_path / "other", STAMP)
    assert foreign.store_group(group())
    foreign.path.rename(tmp_path / "other" / Stamp.of(CPU, H200).file_name)
    with tuning("cached", tmp_path / "other"):
        assert served() == ("masked", "masked")


def test_pinned_winners(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(encode(Stamp.of(CPU, H200), {}, {group().key: group()}))
    kept(tmp_path, group("grouped"))
    with tuning("pinned", tmp_path, tune_file=path):
        assert served() == ("unmasked", "masked")
    with tuning("pinned", tmp_path):
        assert served() == ("masked", "masked")


def test_groups_and_winners_share_a_file(tmp_path):
    from tests.core.tuning import winner

    cache = TuneCache(tmp_path, STAMP)
    assert cache.store("fwd", "a", winner()) and cache.store_group(group())
    assert cache.store("dgrad", "b", winner())
    held = cache.contents()
    assert held.groups == {group().key: group()}
    assert set(held.winners["fwd"]) == {"a"} and set(held.winners["dgrad"]) == {"b"}
    assert decode(encode(STAMP, *held))[2] == held.groups
    assert "groups" not in json.loads(encode(STAMP, held.winners))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: one.pop("code"),
        lambda one: one.update(flows={"fwd0:64x64/g1": "fastest"}),
        lambda one: one.update(layers={}),
        lambda one: one.update(layers={"fwd0:64x64/g1": 0}),
        lambda one: one.update(microseconds="fast"),
        lambda one: one.update(more=1),
    ],
)
def test_files_with_broken_groups_are_refused(spoil):
    raw = json.loads(encode(STAMP, {}, {group().key: group()}))
    spoil(raw["groups"][group().key])
    with pytest.raises(CacheFileError):
        decode(json.dumps(raw))


def test_a_report_says_what_was_tuned(tmp_path):
    import sparse_bridge

    kept(tmp_path, group(layers={str(A): 4, str(B): 1}))
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        assert not used_groups() and not sparse_bridge.report().groups
        serving_flow(rulebook(), 0, product())
        (line,) = sparse_bridge.report().groups
        assert line == (
            "tuned submanifold/v27/float16/ieee/inference/r8:8: unmasked for fwd0:64x128/g1, "
            "unmasked for fwd0:64x64/g1 (90.0 us a new map, 100.0 by the rules)"
        )
        assert line in str(sparse_bridge.report()) and line in sparse_bridge.report()._repr_html_()
        assert sparse_bridge.report().to_dict()["groups"] == (line,)


def test_nothing_is_read_or_hashed_where_nothing_was_tuned(tmp_path, monkeypatch):
    """An empty table is all that a layer meets."""
    from sparse_bridge.core.conv import choice
    from sparse_bridge.core.tuning import groups

    monkeypatch.setattr(groups, "code_hash", None)
    monkeypatch.setattr(choice, "map_class_of", None)
    with tuning("cached", tmp_path):
        assert served() == ("masked", "masked")
    assert len(GroupTable([{}])) == 0
    assert MapClass("other", 8, "float16", "ieee", False, (0, 0)).near()[2].rows == (-1, -1)
