"""enable / disable: choice of mode, holding and letting go, conflicts, threads, processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import base, call_stats, lifecycle
from sparse_bridge.adapters.base import Patch
from sparse_bridge.core.geometry.sparse_data import SparseData
from sparse_bridge.errors import LifecycleError, SettingError, UnsupportedError
from tests.patience import PATIENCE

from .fakes import FakeAdapter


def modes():
    return {name: one.mode for name, one in sparse_bridge.status().items() if one.enabled}


@pytest.mark.parametrize(
    ("real", "mode", "version", "reason"),
    [
        ("working", "patch", "9.1.0", "is installed and imports"),
        ("broken", "standin", "9.0.3", "failed to import: OSError: libfake.so.11"),
        (None, "standin", "9.0.3", "is not installed"),
    ],
)
def test_auto_patches_what_works_and_stands_in_for_the_rest(world, real, mode, version, reason):
    name = world.framework(real).name
    with sparse_bridge.enable(name) as handle:
        status = handle.status()[name]
        assert (status.enabled, status.mode, status.version) == (True, mode, version)
        assert reason in status.reason
        assert status.notes == ("profile 9",)
        assert status.dataflow and status.device
    assert not sparse_bridge.status()[name].enabled


def test_patching_reaches_what_was_imported_before_and_after(world):
    adapter = world.framework("working")
    conv = importlib.import_module(f"{adapter.name}.engine.conv")
    importlib.import_module(adapter.main)
    live, before = conv.Conv(), dict(vars(conv.Conv))
    with sparse_bridge.enable(adapter.name) as handle:
        assert handle.status()[adapter.name].reason.endswith("is imported already")
        assert live.forward(1) == ("bridged", 1)
        assert importlib.import_module(adapter.main).Conv is conv.Conv
    assert live.forward(1) == ("original", 1)
    assert dict(vars(conv.Conv)) == before


def test_modes_that_cannot_be_had(world):
    absent, broken = world.framework().name, world.framework("broken").name
    working = world.framework("working")
    with pytest.raises(LifecycleError, match=r"not installed.*>=9,<10.*mode 'auto'"):
        sparse_bridge.enable(absent, mode="patch")
    with pytest.raises(LifecycleError, match=r"libfake\.so\.11"):
        sparse_bridge.enable(broken, mode="patch")
    importlib.import_module(working.main)
    with pytest.raises(LifecycleError, match=r"is there already.*before its first import"):
        sparse_bridge.enable(working.name, mode="standin")
    assert modes() == {}


def test_standin_can_shadow_a_working_library(world):
    adapter = world.framework("working")
    with sparse_bridge.enable(adapter.name, mode="standin"):
        assert importlib.import_module(adapter.main).Conv(1).forward(2) == ("standin", 2)
    assert importlib.import_module(adapter.main).Conv().forward(2) == ("original", 2)


def test_enabling_twice_is_enabling_once(world):
    adapter = world.framework("working")
    conv = adapter.conv_module()
    sparse_bridge.enable(adapter.name)
    installed = vars(conv.Conv)["forward"]
    sparse_bridge.enable(adapter.name)
    sparse_bridge.enable()
    assert vars(conv.Conv)["forward"] is installed
    sparse_bridge.disable(adapter.name)
    assert "forward" not in vars(conv.Conv)
    sparse_bridge.disable(adapter.name)


def test_an_inner_block_does_not_undo_an_outer_enable(world):
    first, second = world.framework("working").name, world.framework().name
    with sparse_bridge.enable(first) as outer:
        with sparse_bridge.enable(first, second) as inner:
            assert modes() == {first: "patch", second: "standin"}
        assert modes() == {first: "patch"}
        inner.disable()
        assert modes() == {first: "patch"}
    assert modes() == {}
    outer.disable()


def test_a_stale_handle_does_not_undo_a_later_enable(world):
    name = world.framework().name
    stale = sparse_bridge.enable(name)
    sparse_bridge.disable()
    sparse_bridge.enable(name)
    stale.disable()
    assert modes() == {name: "standin"}


def test_other_options_while_enabled_are_refused(world):
    name = world.framework("working").name
    sparse_bridge.enable(name, strict=True)
    sparse_bridge.enable(name, mode="auto")
    sparse_bridge.enable(name, mode="patch", strict=True)
    with pytest.raises(LifecycleError, match=r"mode='standin' \(it is 'patch'\).*disable"):
        sparse_bridge.enable(name, mode="standin")
    with pytest.raises(LifecycleError, match=r"strict=False \(it is True\)"):
        sparse_bridge.enable(name, strict=False)
    sparse_bridge.disable()
    with sparse_bridge.enable(name, strict=False):
        pass


def test_optimize_is_a_setting_while_frameworks_are_enabled(world, plain_settings):
    one, other = world.framework("working").name, world.framework().name
    assert settings.get().optimize == "auto"
    with sparse_bridge.enable(one, optimize="graphs"):
        with sparse_bridge.enable(other):
            assert settings.get().optimize == "graphs"
        with sparse_bridge.enable(one, other, optimize="graphs"):
            pass
        for name in (one, other):
            with pytest.raises(LifecycleError, match=r"optimize is 'off', but .*'graphs'.*disable"):
                sparse_bridge.enable(name, optimize="off")
        assert modes() == {one: "patch"}
    assert settings.get().optimize == "auto"
    with sparse_bridge.enable(one), sparse_bridge.enable(one, optimize="off"):
        assert settings.get().optimize == "off"
    assert settings.get().optimize == "auto"
    with sparse_bridge.enable(one, optimize="off"):
        sparse_bridge.update_settings(optimize="graphs")
    assert settings.get().optimize == "graphs", "what was chosen since counts"


def test_a_failure_half_way_undoes_the_frameworks_before_it(world):
    good, bad = world.framework("working"), world.framework("broken")
    with pytest.raises(LifecycleError):
        sparse_bridge.enable(good.name, bad.name, mode="patch")
    assert modes() == {}
    assert good.conv_module().Conv().forward(1) == ("original", 1)


def test_names_are_checked(world):
    name = world.framework().name
    for call in (sparse_bridge.enable, sparse_bridge.disable):
        with pytest.raises(SettingError, match=f"'nonesuch' is unknown; expected one of {name}"):
            call("nonesuch")
    with pytest.raises(SettingError, match="mode is 'fast'"):
        sparse_bridge.enable(name, mode="fast")
    with pytest.raises(SettingError, match="optimize is 'on'; expected one of auto"):
        sparse_bridge.enable(name, optimize="on")
    with pytest.raises(SettingError, match="strict is 'yes'"):
        sparse_bridge.enable(name, strict="yes")


def test_import_names_are_names_too(plain_settings):
    assert base.load("MinkowskiEngine") is base.load("minkowski")
    with pytest.raises(SettingError, match="Did you mean: 'MinkowskiEngine'"):
        base.load("MinkowskiEngin")
    data = SparseData(torch.ones(1, 1), torch.zeros(1, 4, dtype=torch.int32), (1, 1, 1))
    with sparse_bridge.enable("MinkowskiEngine", mode="standin") as handle:
        assert list(handle.status()) == ["minkowski"]
        assert type(sparse_bridge.convert(data, to="MinkowskiEngine")).__module__.startswith("MinkowskiEngine")


def test_names_in_one_text():
    with pytest.raises(SettingError, match=r"'spconv,torchsparse'; expected names, as in enable\('spconv', 'torch"):
        sparse_bridge.enable("spconv,torchsparse")


def test_an_adapter_that_is_not_there(world):
    base.ADAPTERS["later"] = "sparse_bridge.adapters.later:ADAPTER"
    base.ADAPTERS["empty"] = "sparse_bridge.errors:ADAPTER"
    for name in ("later", "empty"):
        with pytest.raises(UnsupportedError, match=rf"adapter of {name} .* not part of"):
            sparse_bridge.enable(name)
    with pytest.raises(LifecycleError, match=r"no framework that it can bridge \(later: .*[^.]; empty: .*[^.]\)\.$"):
        sparse_bridge.enable()
    name = world.framework().name
    with sparse_bridge.enable():
        assert modes() == {name: "standin"}
        assert "not part of this installation" in sparse_bridge.status()["later"].reason


def test_patch_mode_without_names_takes_what_is_there(world):
    there, absent = world.framework("working").name, world.framework().name
    with sparse_bridge.enable(mode="patch"):
        assert modes() == {there: "patch"}
        assert "not installed" in sparse_bridge.status()[absent].reason


def test_a_library_that_is_there_but_unsupported_is_never_passed_over(world):
    class Outdated(FakeAdapter):
        def patches(self) -> list[Patch]:
            raise UnsupportedError("version 9.1.0; expected >=10; upgrade it.")

    adapter = world.framework("working")
    base.register_for_testing(Outdated(adapter.name, adapter.standin_root))
    with pytest.raises(UnsupportedError, match="upgrade"):
        sparse_bridge.enable()


def test_settings_give_the_defaults(world):
    adapter = world.framework("working")
    with sparse_bridge.override_settings(mode="standin"), sparse_bridge.enable(adapter.name):
        assert modes() == {adapter.name: "standin"}
    conv = adapter.conv_module().Conv()
    with sparse_bridge.enable(adapter.name):
        assert conv.forward(1, 2) == ("original", 2)
        with (
            sparse_bridge.override_settings(strict=True),
            pytest.raises(UnsupportedError, match=r"Conv cannot be bridged: scale=2 unsupported"),
        ):
            conv.forward(1, 2)
    with sparse_bridge.enable(adapter.name, strict=True), pytest.raises(UnsupportedError):
        conv.forward(1, 2)


def test_reports_cover_what_ran_while_held(world):
    adapter = world.framework("working")
    conv = adapter.conv_module().Conv()
    sparse_bridge.enable(adapter.name)
    conv.forward(1)
    with sparse_bridge.enable(adapter.name) as handle:
        conv.forward(1)
        conv.forward(1, 2)
    conv.forward(1)
    assert handle.report().layers == {adapter.name: {"Conv": call_stats.LayerCount(1, {"scale=2 unsupported": 1})}}
    assert sparse_bridge.report().layers[adapter.name]["Conv"].bridged == 3
    text = str(handle.report())
    assert f"{adapter.name} 9.1.0: patch" in text
    assert "scale=2 unsupported (1)" in text
    assert adapter.name in repr(handle) and "(disabled)" in repr(handle)


def test_threads_may_race(world):
    patched, stood_in = world.framework("working"), world.framework()
    conv = patched.conv_module()
    before = dict(vars(conv.Conv))
    failures = []

    def work():
        try:
            for _ in range(100):
                with sparse_bridge.enable(patched.name, stood_in.name):
                    assert conv.Conv().forward(1) == ("bridged", 1)
                    assert importlib.import_module(stood_in.main).Conv(1).width == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert modes() == {}
    assert dict(vars(conv.Conv)) == before
    assert call_stats.counts()[patched.name]["Conv"].bridged == 800


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_enabled_and_not_deadlocked(world):
    name = world.framework().name
    sparse_bridge.enable(name)
    ready, done = threading.Event(), threading.Event()

    def hold_locks():
        with lifecycle._lock, call_stats._lock:
            ready.set()
            done.wait()

    holder = threading.Thread(target=hold_locks)
    holder.start()
    ready.wait()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(name,))
    child.start()
    child.join(PATIENCE)
    alive = child.is_alive()
    if alive:
        child.kill()
    done.set()
    holder.join()
    assert not alive and child.exitcode == 0


def _in_child(name):
    importlib.import_module(f"{name}.engine").Conv(1)
    call_stats.note(name, "Conv")
    sparse_bridge.disable()
    sys.exit(int(name in sys.modules))


def test_a_report_says_which_frameworks_were_imported(world):
    used, idle = world.framework(), world.framework()
    handle = sparse_bridge.enable()
    assert f"not imported: {used.name}, {idle.name}" in str(sparse_bridge.report())
    importlib.import_module(f"{used.name}.engine")
    expected = {used.name: True, idle.name: False}
    assert {name: one.imported for name, one in handle.status().items()} == expected
    handle.disable()  # which takes the modules away
    assert {one.framework: one.imported for one in handle.report().frameworks} == expected


@pytest.mark.slow
def test_a_block_that_is_open_when_the_interpreter_ends_says_nothing():
    """Its generator is closed when `sys.meta_path` is gone."""
    text = (
        "import contextlib, sparse_bridge\n"
        "@contextlib.contextmanager\n"
        "def bridged():\n"
        "    with sparse_bridge.enable('spconv', mode='standin'): yield\n"
        "block = bridged()\n"
        "block.__enter__()\n"
        "import spconv.pytorch\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
