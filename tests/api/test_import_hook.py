"""Stand-ins answer imports as the real library would, and only for their own names."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import pkgutil
import sys
import types

import pytest

import sparse_bridge
from sparse_bridge.adapters.import_hook import import_problem
from sparse_bridge.errors import UnsupportedError

from .fakes import write


def load(name):
    return importlib.import_module(name)


def test_modules_carry_upstream_names_and_valid_specs(world):
    name = world.framework().name
    with sparse_bridge.enable(name):
        before = importlib.util.find_spec(name)
        assert before is not None and before.name == name
        conv = load(f"{name}.engine.conv")
        assert conv.__name__ == conv.__spec__.name == f"{name}.engine.conv"
        assert conv.Conv.__module__ == f"{name}.engine.conv"
        assert conv.__package__ == f"{name}.engine"
        assert conv.__file__ == str(world.standins / name / "engine" / "conv.py")
        top = sys.modules[name]
        assert importlib.util.find_spec(name) is top.__spec__
        assert list(top.__path__) == [str(world.standins / name)]
        assert {m.name for m in pkgutil.iter_modules(top.__path__)} == {"constants", "engine"}
        assert top.constants.DEBUG is False and top.engine.conv is conv
        assert load(f"{name}_tv.view").view(1) == 1
        assert importlib.reload(conv) is conv
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        load(name)


def test_missing_submodules_never_reach_an_installed_library(world):
    name = world.framework("broken").name
    with sparse_bridge.enable(name):
        with pytest.raises(ModuleNotFoundError, match="in sparse_bridge's stand-in") as caught:
            load(f"{name}.only_real")
        assert caught.value.name == f"{name}.only_real"
        with pytest.raises(ModuleNotFoundError):
            load(f"{name}_tv.nothing")
        with pytest.raises(ImportError):
            exec(f"from {name}.engine import NoSuchLayer", {})
    assert load(f"{name}.only_real").__file__.startswith(str(world.site))


def test_other_names_are_not_touched(world):
    name = world.framework().name
    write(world.site / f"{name}x.py", "who = 'neighbour'")
    with sparse_bridge.enable(name):
        assert load(f"{name}x").who == "neighbour"


def test_module_and_class_objects_survive_disabling(world):
    name = world.framework().name
    with sparse_bridge.enable(name):
        first = load(f"{name}.engine")
        instance = first.Conv(3)
    assert not [loaded for loaded in sys.modules if loaded.startswith(name)]
    with sparse_bridge.enable(name):
        again = load(f"{name}.engine")
        assert again is first and isinstance(instance, again.Conv)
        assert load(f"{name}_tv").__version__ == "1.2.3", "modules not imported before still load"


def test_instances_pickle_under_upstreams_name(world):
    name = world.framework().name
    with sparse_bridge.enable(name):
        data = pickle.dumps(load(f"{name}.engine").Conv(7), protocol=0)
        assert f"{name}.engine.conv".encode() in data
    with sparse_bridge.enable(name):
        assert pickle.loads(data).width == 7


def test_half_imported_modules_are_purged(world):
    adapter = world.framework("broken")
    problem = import_problem(adapter)
    assert problem is not None
    assert problem.endswith("failed to import: OSError: libfake.so.11: cannot open shared object")
    assert not [loaded for loaded in sys.modules if loaded.startswith(adapter.name)]


@pytest.mark.parametrize("named", [True, False])
def test_a_release_without_the_main_module_is_named(world, named):
    adapter = world.framework()
    write(world.site / adapter.name / "__init__.py", "__version__ = '1.2.1'" if named else "")
    metadata = f"Metadata-Version: 2.1\nName: {adapter.name}\nVersion: 1.2.1\n"
    write(world.site / f"{adapter.name}-1.2.1.dist-info" / "METADATA", metadata)
    said = f"{adapter.name} 1.2.1 is installed, which has no {adapter.main} (supported: >=9,<10)"
    assert import_problem(adapter) == said
    with sparse_bridge.enable(adapter.name) as handle:
        assert handle.status()[adapter.name].reason == said


def test_what_a_users_failed_import_left_steps_aside_and_returns(world):
    name = world.framework("broken").name
    with pytest.raises(OSError, match="libfake"):
        load(f"{name}.engine")
    left = {k: v for k, v in sys.modules.items() if k.startswith(name)}
    assert left
    companion = sys.modules[f"{name}_tv"] = types.ModuleType(f"{name}_tv")
    with sparse_bridge.enable(name):
        assert load(name).__version__ == "9.0.3"
        assert load(f"{name}_tv") is not companion
    now = {k: v for k, v in sys.modules.items() if k.startswith(name)}
    assert now == {**left, f"{name}_tv": companion}


def test_a_blocked_name_is_answered_and_blocked_again(world):
    name = world.framework().name
    sys.modules[name] = None
    with sparse_bridge.enable(name):
        assert load(name).__version__ == "9.0.3"
    assert sys.modules[name] is None


def test_a_stray_folder_is_not_an_installation(world):
    adapter = world.framework()
    (world.site / adapter.name).mkdir()
    assert import_problem(adapter) == f"{adapter.name} is not installed"


def test_a_module_without_spec_counts_as_found_but_broken(world):
    adapter = world.framework()
    sys.modules[adapter.name] = types.ModuleType(adapter.name)
    assert "failed to import: ModuleNotFoundError" in (import_problem(adapter) or "")


def test_an_incomplete_tree_is_refused(world):
    adapter = world.framework()
    adapter.packages += ("fake_without_a_tree",)
    finders = list(sys.meta_path)
    with pytest.raises(UnsupportedError, match="no stand-in for fake_without_a_tree"):
        sparse_bridge.enable(adapter.name)
    assert sys.meta_path == finders


def test_metadata_answers_only_for_absent_distributions(world):
    name = world.framework().name
    other = world.framework().name
    info = world.site / f"{other}-5.5.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {other}\nVersion: 5.5\n")
    with sparse_bridge.enable(name, other):
        assert importlib.metadata.version(name.upper()) == "9.0.3"
        assert importlib.metadata.version(f"{name}-tv") == "1.2.3"
        assert importlib.metadata.version(other) == "5.5"
        names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        assert names.count(name) == names.count(other) == 1
        importlib.metadata.entry_points()
        assert name not in sys.modules, "metadata imports nothing"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
