"""One record per framework: what the shared parts read, and that they name no framework."""

from __future__ import annotations

import ast
import functools
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters import base, protocol
from sparse_bridge.core import late_maps
from sparse_bridge.core.geometry.sparse_data import SparseData
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.errors import UnsupportedError
from tests.adapters.test_convert import NAMES, frameworks, make, rows, scene  # noqa: F401
from tests.each import each_of, tree_of

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
# Where frameworks are named: their adapters, models for each of them, what builds or checks such
# models, and the export of spconv's. The table of adapters is the one exception elsewhere.
OWN = tuple(f"adapters/{name}/" for name in base.ADAPTERS)
USERS = (*("commands/", "export/", "tools/acceptance/", "tools/checkpoints/", "tools/demo/"), "tools/networks/")
# Attributes that sparse tensors of one framework have and others do not.
ATTRIBUTES = {
    "indice_dict",
    "indices",
    "replace_feature",
    "kmaps",
    "cmaps",
    "spatial_range",
    "coordinate_map_key",
    "coordinate_manager",
    "indice_key",
    "feats",
}
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
EVERYWHERE = [where for where in FILES if not where.startswith((*OWN, *USERS))]
READING = "adapters/", "core/capture/", "core/prefetch/", "optimization"
READERS = [where for where in EVERYWHERE if where.startswith(READING)]
ALLOWED = {"adapters/base.py": {*base.ADAPTERS, *base.IMPORT_NAMES}}


def named(code: str | ast.Module) -> tuple[set[str], set[str]]:
    """(frameworks, attributes of their tensors) that code names; prose does not count."""
    words = {framework.packages[0] for framework in base.frameworks()} | set(base.ADAPTERS)
    tree, found, attributes = ast.parse(code) if isinstance(code, str) else code, set(), set()
    prose = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            attributes.add(node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found |= {word for word in words if node.value.partition(".")[0] == word}
            attributes |= ATTRIBUTES & {node.value}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {part for name in names for part in name.split(".") if part in words}
    return found, attributes


@each_of(EVERYWHERE)
def test_shared_parts_name_no_framework(where):
    names, attributes = named(tree_of(FILES[where]))
    assert names <= ALLOWED.get(where, set())
    assert where not in READERS or not attributes


def test_the_rule_sees_names():
    assert len(EVERYWHERE) > 100 and len(READERS) > 15
    assert named("from .spconv import maps")[0] == {"spconv"}
    assert named("import MinkowskiEngine")[0] == {"MinkowskiEngine"}
    assert named('FRAMEWORKS = ("torchsparse",)')[0] == {"torchsparse"}
    assert named('y = getattr(x.indice_dict, "indices")') == (set(), {"indice_dict", "indices"})
    assert named('def f():\n    """spconv"""\n    return "x"') == (set(), set())


@pytest.mark.parametrize("name", NAMES)
def test_tensors(frameworks, name):  # noqa: F811
    feats, coords = scene()
    x = make(frameworks, name, feats, coords)
    found = protocol.of(x)
    assert found is protocol.of_framework(name) and found.is_tensor(x)
    assert base.load(name).tensor_class() is type(x)
    own, places = rows(x, name)
    assert found.features_of(x) is own is protocol.features_of(x)
    assert torch.equal(found.coordinates_of(x), places)
    y = found.with_features(x, own * 2)
    assert type(y) is type(x) and torch.equal(found.features_of(y), own * 2)
    assert torch.equal(found.coordinates_of(y), places)
    data = found.to_core(x)
    assert isinstance(data, SparseData) and torch.equal(data.feats, own)
    again = found.from_core(data, x)
    assert torch.equal(found.features_of(again), own)


def test_other_objects_belong_to_nobody():
    for other in (None, 3, "x", {}, nn.ReLU(), SparseData):
        assert protocol.of(other) is None and protocol.features_of(other) is None
    plain = torch.zeros(2)
    assert protocol.features_of(plain) is plain


@pytest.mark.parametrize("name", NAMES)
def test_layers(frameworks, name):  # noqa: F811
    kinds = {
        "spconv": lambda sp: sp.SubMConv3d(4, 8, 3),
        "torchsparse": lambda ts: ts.nn.Conv3d(4, 8, 3),
        "minkowski": lambda me: me.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3),
    }
    layer = kinds[name](frameworks[name])
    assert protocol.is_layer(layer) and protocol.is_layer(nn.ReLU(), nn.ReLU)
    assert not protocol.is_layer(layer, nn.ReLU)
    layer.__class__ = type("Mine", (type(layer),), {})
    assert not protocol.is_layer(layer)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_over_other_rows(frameworks, name):  # noqa: F811
    """What replays do: a copy over padded coordinates, and a result on the rows of an input."""
    feats, coords = scene()
    x = make(frameworks, name, feats, coords)
    framework = protocol.of(x)
    root = framework.capture_root(x)
    assert root.coords.dtype == torch.int32 and len(root.coords) == len(coords)
    assert all(low <= 0 for low in root.box.lo) and root.box.size[0] == 3
    few = CoordinateMap(root.coords[:5], root.box)
    clone = framework.over(x, feats[:5], few)
    assert type(clone) is type(x) and framework.features_of(clone) is not framework.features_of(x)
    assert torch.equal(framework.coordinates_of(clone), framework.coordinates_of(x)[:5])
    assert framework.on_rows_of(clone, framework.with_features(clone, feats[:5] * 2))
    y = framework.result(x, clone, feats * 3, None, None)
    assert framework.on_rows_of(x, y) and torch.equal(framework.features_of(y), feats * 3)
    assert framework.capture_root(y) is not None
    layer = {
        "spconv": lambda sp: sp.SubMConv3d(feats.shape[1], 8, 3, indice_key="a"),
        "torchsparse": lambda ts: ts.nn.Conv3d(feats.shape[1], 8, 3),
        "minkowski": lambda me: me.MinkowskiConvolution(feats.shape[1], 8, kernel_size=3, dimension=3),
    }[name](frameworks[name])
    behind = framework.capture_root(layer(x))
    assert behind.coords.shape == root.coords.shape and not behind.known  # the layer made no level
    strided = {
        "spconv": lambda sp: sp.SparseConv3d(feats.shape[1], 8, 2, 2, indice_key="b"),
        "torchsparse": lambda ts: ts.nn.Conv3d(feats.shape[1], 8, 2, stride=2),
        "minkowski": lambda me: me.MinkowskiConvolution(feats.shape[1], 8, kernel_size=2, stride=2, dimension=3),
    }[name](frameworks[name])
    coarse = strided(x)
    deeper = framework.capture_root(coarse)
    assert deeper.known == framework.levels_of(coarse) and len(deeper.known) == (name != "spconv")
    assert framework.levels_of(framework.over(coarse, framework.features_of(coarse), few)) == frozenset()


def test_maps_that_are_made_when_wanted():
    asked = []
    every = {"down": 1, "same": 2, "more": 3}
    make = functools.cache(lambda key: asked.append(key) or every[key])
    maps = late_maps.LateMaps({}, late_maps.LateSource(("down", "same"), {"down"}, make))
    maps["own"] = 4
    handed_on = late_maps.carried(maps)
    assert late_maps.present(maps) == {"own": 4} and maps.get("other") is None and "more" not in maps
    assert late_maps.map_for_layer(maps, "same") is None and late_maps.map_for_layer(maps, "own") == 4 and not asked
    assert late_maps.map_for_layer(handed_on, "down") == 1 and asked == ["down"]
    assert maps.late_keys() == {"down", "same"} and handed_on.late_keys() == {"same"}
    assert maps["same"] == 2 and len(maps) == 3 and asked == ["down", "same"]
    assert dict(maps) == {**maps} == maps.copy() == {"own": 4, "down": 1, "same": 2}
    again = pickle.loads(pickle.dumps(handed_on))
    assert type(again) is dict and again == maps
    assert late_maps.map_for_layer({"down": 5}, "down") == 5 and late_maps.carried({"down": 5}) == {"down": 5}
    with pytest.raises(KeyError):
        maps["other"]
    del maps["down"]
    assert "down" not in maps and maps.get("down") is None and "down" not in maps.copy() and "down" in handed_on


@pytest.mark.parametrize("look", [len, list, dict, bool, str, dict.copy, dict.items, lambda maps: {**maps}])
def test_whoever_looks_at_all_maps_has_them_made(look):
    every = {"down": 1, "same": 2}
    maps = late_maps.LateMaps({}, late_maps.LateSource(tuple(every), {"down"}, every.get))
    found = getattr(maps, look.__name__)() if look in (dict.copy, dict.items) else look(maps)
    assert found == (every.items() if look is dict.items else look(every))


def test_maps_are_listed_in_the_order_of_layers():
    """Whatever a program wrote or took out before they were made."""
    every = {"a": 1, "d": 2, "b": 3}
    source = late_maps.LateSource(tuple(every), {"d"}, every.get)
    late, eager = late_maps.LateMaps({"first": 0}, source), {"first": 0, **every}
    for maps in (late, eager):
        maps["own"] = 4
        maps["d"] = 5
        maps.update(more=6)
        maps |= {"still more": 7}
        assert maps.setdefault("b", 8) == 3 and maps.setdefault("new", 9) == 9
        assert maps.pop("a") == 1
        maps["a"] = 10
        del maps["more"], maps["first"], maps["d"]
        maps["first"] = 0
    handed_on = late_maps.LateMaps(late, late_maps.LateSource(("e",), {"e"}, lambda key: 11))
    assert list(late.items()) == list(eager.items()) and list(late) == list(eager)
    assert list(handed_on.items()) == [*eager.items(), ("e", 11)] and handed_on.popitem() == ("e", 11)
    handed_on["e"] = 12
    assert list(handed_on.items()) == [*eager.items(), ("e", 12)]


def test_a_framework_that_is_not_installed(monkeypatch):
    before = list(base.ADAPTERS)
    monkeypatch.setitem(base.ADAPTERS, "absent", "sparse_bridge.adapters.absent:ADAPTER")
    assert [one.name for one in base.frameworks()] == before


WITHOUT_CAPTURE = """
import importlib.abc, sys, torch

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sparse_bridge.core.capture"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import sparse_bridge
from sparse_bridge.errors import UnsupportedError
model = torch.nn.Linear(2, 2)
try:
    sparse_bridge.optimize(model, graphs=True)
except UnsupportedError as error:
    print(error)
sparse_bridge.restore(sparse_bridge.optimize(model))
assert "forward" not in model.__dict__
"""


def test_optimize_without_the_folder_that_captures():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CAPTURE], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert "not part of this installation" in done.stdout


def test_only_a_missing_folder_is_forgiven(monkeypatch, tmp_path):
    monkeypatch.setattr(base.importlib, "import_module", _broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        base.capture("replay")
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="nonesuch"):
        base.capture("nonesuch")


def _broken(name):
    raise ModuleNotFoundError("No module named 'other'", name="other")
