"""The disk cache of winners: versions, damage, kills in the middle of a write, many writers."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import random
import sys
import time

import pytest

from sparse_bridge import folders, log, settings
from sparse_bridge.core.tuning import tune_cache
from sparse_bridge.core.tuning.tune_cache import CacheFileError, TuneCache, decode, encode
from sparse_bridge.errors import SettingError
from tests.core.tuning import STAMP, fork, kill, needs_fork, winner
from tests.patience import PATIENCE

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    log.reset()


@pytest.fixture
def cache(tmp_path):
    return TuneCache(tmp_path, STAMP)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_round_trip(cache):
    assert cache.load() == {}
    tile = {"block_m": 16, "vendor": (("kpack", 2), ("waves_per_eu", 1))}
    assert cache.store("fwd", "a", winner(1.25, **tile))
    assert cache.store("wgrad", "a", winner(2.0, num_warps=8))
    found = TuneCache(cache.folder, STAMP).load()
    assert found["fwd"] == {"a": winner(1.25, **tile)}
    assert found["wgrad"] == {"a": winner(2.0, num_warps=8)}
    assert found["dgrad"] == {}, "directions are namespaces"
    assert cache.store("fwd", "a", winner(1.0))
    assert cache.load()["fwd"] == {"a": winner(1.0)}
    assert not list(cache.folder.glob(".*.tmp"))


def test_equal_winners_are_equal_files():
    one = {"fwd": {"a": winner(), "b": winner(2.0)}, "dgrad": {}}
    other = {"dgrad": {}, "fwd": {"b": winner(2.0), "a": winner()}}
    assert encode(STAMP, one) == encode(STAMP, other)
    assert decode(encode(STAMP, one)) == (STAMP, {**one, "wgrad": {}}, {})


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": "abd"},
        {"triton": "3.7.0"},
        {"device": "NVIDIA H100"},
        {"arch": "sm_91"},
        {"compute_units": 114},
        {"format": 1},
    ],
    ids=str,
)
def test_another_version_is_another_file(cache, change, caplog):
    cache.store("fwd", "a", winner())
    other = TuneCache(cache.folder, dataclasses.replace(STAMP, **change))
    assert other.path != cache.path and other.load() == {}
    # A file under a foreign name is not believed either.
    os.replace(cache.path, other.path)
    assert other.load() == {}
    assert [m for m in warnings_of(caplog) if "moved" in m]
    assert other.path.with_name(other.path.name + ".aside").exists()


GOOD = json.loads(encode(STAMP, {"fwd": {"a": winner()}}))


def spoiled(change):
    raw = json.loads(json.dumps(GOOD))
    change(raw)
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        json.dumps(GOOD).encode()[:-40],
        spoiled(lambda raw: raw.update(format=7)),
        spoiled(lambda raw: raw.pop("arch")),
        spoiled(lambda raw: raw.update(winners=[])),
        spoiled(lambda raw: raw["winners"].update(sideways={"a": {}})),
        spoiled(lambda raw: raw["winners"]["fwd"]["a"].pop("us")),
        spoiled(lambda raw: raw["winners"]["fwd"]["a"]["tile"].update(block_m=48)),
        spoiled(lambda raw: raw["winners"]["fwd"]["a"]["tile"].update(block_n=0)),
        spoiled(lambda raw: raw["winners"]["fwd"]["a"]["tile"].update(num_stages="2")),
        spoiled(lambda raw: raw["winners"]["fwd"]["a"]["tile"].update(vendor={"kpack": "x"})),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_damaged_file_is_moved_aside_with_one_warning(cache, content, caplog):
    cache.path.write_bytes(content)
    assert cache.load() == {} and cache.load() == {}
    assert len(warnings_of(caplog)) == 1 and str(cache.path) in warnings_of(caplog)[0]
    aside = cache.path.with_name(cache.path.name + ".aside")
    assert aside.read_bytes() == content and not cache.path.exists()
    assert cache.store("fwd", "b", winner())
    assert cache.load()["fwd"] == {"b": winner()}
    cache.path.write_bytes(content)
    assert cache.store("fwd", "c", winner()), "a writer copes with damage, too"
    assert cache.load()["fwd"] == {"c": winner()}


def test_a_folder_that_cannot_be_used_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = TuneCache(tmp_path / "file", STAMP)
    for _ in range(3):
        assert cache.load() == {}
        assert cache.store("fwd", "a", winner()) is False
        with cache.claim("fwd", "a", 0.1) as mine:
            assert mine is False
    messages = warnings_of(caplog)
    assert messages and len(messages) == len(set(messages)) <= 2


def test_a_write_that_fails_leaves_the_old_file(cache, monkeypatch, caplog):
    cache.store("fwd", "a", winner())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cache.store("fwd", "b", winner()) is False
    assert cache.load()["fwd"] == {"a": winner()}
    assert "No space left" in warnings_of(caplog)[0]


def _store_many(connection, place, writer, count):
    cache = TuneCache(place, STAMP)
    connection.recv()
    done = [cache.store("fwd", f"{writer}-{i}", winner(float(i))) for i in range(count)]
    connection.send(done)


@needs_fork
def test_concurrent_writers_merge(cache, monkeypatch):
    monkeypatch.setattr(tune_cache, "WRITE_WAIT", 60.0)  # on a busy machine, too
    started = [fork(_store_many, cache.folder, writer, 15) for writer in range(4)]
    for _, connection in started:
        connection.send("go")
    for child, connection in started:
        assert connection.poll(PATIENCE) and all(connection.recv())
        child.join(PATIENCE)
    found = cache.load()["fwd"]
    assert set(found) == {f"{writer}-{i}" for writer in range(4) for i in range(15)}
    assert found["2-7"] == winner(7.0)


def _store_for_ever(connection, place, first):
    cache = TuneCache(place, STAMP)
    for i in range(first, first + 10_000):
        if cache.store("fwd", str(i), winner(float(i))):
            connection.send(i)


@pytest.mark.slow
@needs_fork
def test_writers_killed_at_any_moment(cache):
    old = {f"old-{i}": winner(float(i)) for i in range(300)}  # takes a moment to write
    cache.path.write_text(encode(STAMP, {"dgrad": old}))
    chance, stored = random.Random(0), set()
    for attempt in range(25):
        child, connection = fork(_store_for_ever, cache.folder, 10_000 * attempt)
        assert connection.poll(PATIENCE)
        time.sleep(chance.uniform(0, 0.02))
        kill(child)
        try:
            while connection.poll(0):
                stored.add(str(connection.recv()))
        except EOFError:
            pass
        _, winners, _ = decode(cache.path.read_text())  # raises if the file is damaged
        assert stored <= set(winners["fwd"]) and winners["dgrad"] == old
    assert len(stored) >= 25
    assert cache.store("fwd", "end", winner()), "the dead hold no lock"
    assert not list(cache.folder.glob("*.aside"))


def _die_in(connection, place, step):
    def stop(*arguments):
        connection.send("here")
        time.sleep(60)

    setattr(os, step, stop)
    TuneCache(place, STAMP).store("fwd", "b", winner())


@needs_fork
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_killed_between_writing_and_replacing(cache, step):
    cache.store("fwd", "a", winner())
    before = cache.path.read_bytes()
    child, connection = fork(_die_in, cache.folder, step)
    assert connection.poll(PATIENCE) and connection.recv() == "here"
    kill(child)
    assert cache.path.read_bytes() == before
    assert cache.store("fwd", "c", winner())
    assert set(cache.load()["fwd"]) == {"a", "c"}
    assert not list(cache.folder.glob(".*.tmp")), "the next writer takes over what was left"


def _hold(connection, place):
    with TuneCache(place, STAMP).claim("fwd", "a", 1.0) as mine:
        connection.send(mine)
        time.sleep(60)


@needs_fork
def test_one_process_claims_a_bucket_and_waiting_for_it_ends(cache):
    child, connection = fork(_hold, cache.folder)
    try:
        assert connection.poll(PATIENCE) and connection.recv() is True
        with cache.claim("fwd", "a", 0.1) as mine:
            assert mine is False, "it waited until the other ended"
        with cache.claim("fwd", "b", 0.1) as mine:
            assert mine is True, "another bucket is free"
        with cache.claim("dgrad", "a", 0.1) as mine:
            assert mine is True
        assert cache.store("fwd", "z", winner()), "a claim does not block writers"
    finally:
        kill(child)
    with cache.claim("fwd", "a", 5.0) as mine:
        assert mine is True, "the claim of a dead process is free"


def test_shipped_winners_by_device_then_architecture(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tune_cache, "shipped_folder", lambda: tmp_path)
    assert tune_cache.shipped(STAMP) == []
    foreign = dataclasses.replace(STAMP, kernels="old", triton="3.4.0", compute_units=78)
    (tmp_path / "sm_90.json").write_text(encode(foreign, {"fwd": {"a": winner(1.0)}}))
    (tmp_path / "nvidia-h200.json").write_text(encode(foreign, {"fwd": {"a": winner(2.0)}}))
    assert [source.winners["fwd"]["a"] for source in tune_cache.shipped(STAMP)] == [winner(2.0), winner(1.0)]
    (tmp_path / "nvidia-h200.json").write_text("{")
    assert [source.winners["fwd"]["a"] for source in tune_cache.shipped(STAMP)] == [winner(1.0)]
    assert len(warnings_of(caplog)) == 1


def test_files_that_come_with_the_package():
    """Each says what it was measured on, under the name by which it is looked for."""
    for path in tune_cache.shipped_folder().iterdir():
        if path.name.endswith(".json"):
            stamp, winners, _ = decode(path.read_text(encoding="utf-8"))
            assert path.name.removesuffix(".json") in (stamp.slug, stamp.arch)
            assert any(winners.values())


def test_the_gate_compiles_every_tile_that_comes_with_the_package():
    pytest.importorskip("triton")
    from sparse_bridge.kernels.runtime.target import described
    from sparse_bridge.tools.offline_compile import forms_gemm

    def shape(tile):
        return tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages

    for path in tune_cache.shipped_folder().iterdir():
        if not path.name.endswith(".json"):
            continue
        stamp, winners, _ = decode(path.read_text(encoding="utf-8"))
        target = described(stamp.arch)
        tiles = {"fwd": forms_gemm.gather_tiles(target), "wgrad": forms_gemm.wgrad_tiles(target)}
        tiles["dgrad"] = tiles["fwd"]
        for direction, found in winners.items():
            compiled = {shape(case.tile) for cases in tiles[direction] for case in cases}
            missing = [b for b, winner in found.items() if shape(winner.tile) not in compiled]
            assert not missing, f"{direction} of {path.name}"


def test_where_winners_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with settings.override(cache_dir=""):
        if sys.platform == "linux":
            assert folders.cache() == tmp_path / ".cache" / "sparse_bridge"
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
            assert folders.cache() == tmp_path / "xdg" / "sparse_bridge"
        monkeypatch.setattr(sys, "platform", "darwin")
        assert folders.cache() == tmp_path / "Library" / "Caches" / "sparse_bridge"
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
        assert folders.cache() == tmp_path / "local" / "sparse_bridge"
    with settings.override(cache_dir=pathlib.Path("~/mine")):
        assert folders.cache() == tmp_path / "mine"


def test_settings_of_tuning_are_checked():
    read = settings.from_environment
    assert read({"SPARSE_BRIDGE_TUNE": "pinned"}).tune == "pinned"
    assert read({"SPARSE_BRIDGE_CACHE_DIR": "/x"}).cache_dir == "/x"
    assert read({}).tune == "cached"
    with pytest.raises(SettingError, match="cached, off, full, pinned"):
        read({"SPARSE_BRIDGE_TUNE": "always"})
    with pytest.raises(SettingError, match="expected a path"):
        settings.update(cache_dir=3)


def test_a_pinned_file_must_be_readable(tmp_path):
    path = tmp_path / "winners.json"
    with pytest.raises(SettingError, match=r"winners\.json"):
        tune_cache.pinned(str(path))
    path.write_text("{}")
    with pytest.raises(SettingError, match="--export"):
        tune_cache.pinned(str(path))
    with pytest.raises(CacheFileError):
        decode("{}")
