"""The program that lists the public names of a release: toy releases, and the spconv installed."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest
from public_names.__main__ import table as table_of
from public_names.compiled import bound, merged, used
from public_names.release import Release

from sparse_bridge.tools.api_coverage import table

FILES = {
    "__init__.py": """
__version__ = "1"
from .shapes import *
from .shapes import _hidden
from . import extra as more
from beside import Late
from toycore import Native, _secret
import torch
""",
    "shapes.py": """
import torch
from torch import nn
__all__ = ["Box", "area"]
SIZE, _SIZE = 3, 4
if SIZE > 2:
    def area(box, scale=1.0, *, unit=torch.float32, axes=(1, 2), call=print("x")): ...
else:
    area = None
def _hidden(): ...
class _Base(nn.Module):
    def __init__(self, width, height=2):
        self.width = width
        self._height = height
        self.register_buffer("corners", None)
    def shared(self): ...
class Box(_Base):
    KIND = "box"
    inside: int
    def __len__(self): ...
    def __repr__(self): ...
    @property
    def volume(self): ...
    @staticmethod
    def of(width): ...
    @classmethod
    def unit(cls, *args, **kwargs): ...
    scaled = unit
class Cube(Box):
    def forward(self, x): self.seen: bool = True
if __name__ == "__main__":
    result = 1
""",
    "extra.py": """
import enum
from torch.autograd import Function
from .shapes import Box, Cube as Die
class Colour(enum.Enum):
    RED = 1
class Fold(Function):
    @staticmethod
    def forward(ctx, x, y=None): ...
    @staticmethod
    def backward(ctx, grad): ...
class Pair(Box, Die): ...
""",
    "beside.py": "class Late: ...\n",
    "_private.py": "hidden = 1\n",
    "core.pyi": """
from typing import overload
class Engine:
    power: int
    def __init__(self, power: int = 3) -> None: ...
    @overload
    def run(self, a: int) -> int: ...
    @overload
    def run(self, b: str) -> str: ...
""",
    "motor/__init__.py": "from toy.core import Engine as Motor\n",
}


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "toy"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Release(folder, companion="toycore")


def lines_of(release, module):
    found = table_of("toy", "a toy", {module: release.names(module)}).splitlines()
    return found[3:]


def test_packages_list_what_they_bring_in_from_below(release):
    assert lines_of(release, "toy") == ["Box Late Native __version__ area more"]
    assert "toy._private" not in release.modules([], [])


def test_functions_classes_members_and_attributes_are_listed(release):
    assert lines_of(release, "toy.shapes") == [
        "SIZE",
        "area(box, scale=1.0, *, unit=torch.float32, axes=(1, 2), call=...)",
        "class Box(width, height=2)",
        "    KIND .corners .inside @volume .width __len__()",
        "    of(width)",
        "    scaled(*args, **kwargs)",
        "    shared()",
        "    unit(*args, **kwargs)",
        "class Cube(width, height=2) < Box",
        "    .seen forward(x)",
    ]


def test_enumerations_autograd_and_bases_elsewhere_are_listed(release):
    assert lines_of(release, "toy.extra") == [
        "class Colour",
        "    RED",
        "class Fold()",
        "    apply(x, y=None)",
        "class Pair(width, height=2) < toy.shapes.Box, toy.shapes.Cube",
    ]


def test_what_other_modules_bring_in_is_listed_where_it_is_asked_for(tmp_path, release):
    whole = Release(tmp_path / "toy", companion="toycore", imports=True)
    assert lines_of(whole, "toy.extra") == ["Box Die", *lines_of(release, "toy.extra")]
    for module in ("toy", "toy.beside", "toy.core", "toy.motor", "toy.shapes"):
        assert lines_of(whole, module) == lines_of(release, module)


def test_classes_of_a_stub_are_listed_with_their_members_where_they_are_brought_in(release):
    assert lines_of(release, "toy.motor") == ["class Motor(power=3)", "    .power run(*)"]


def test_a_part_counts_its_modules_and_names(release):
    text = table_of("toy 1", "a toy", release.modules(["toy", "toy.extra"], []))
    assert text.startswith("# toy 1: a toy; 2 modules, 11 names, listed on ")
    assert "\n[toy]  # 6\n" in text and "\n[toy.extra]  # 5\n" in text


def test_bindings_and_uses_of_a_compiled_module_are_joined(tmp_path):
    source = tmp_path / "bind.cpp"
    source.write_text(
        """
// m.def("commented", &commented);
m.def("count", &count, "counts");
m.def("named",
      &named<std::string>);
py::enum_<Mode>(m, "Mode").value("FAST", Mode::FAST).value("SAFE", Mode::SAFE).export_values();
std::string name = std::string("Key");
py::class_<Key>(m, name.c_str()).def(py::init<>()).def("get", &Key::get).def("__repr__", &repr);
py::class_<Manager<T>>(m, (std::string("Manager") + suffix).c_str()).def("size", &size);
"""
    )
    trees = [
        ast.parse("import native.core as nc\nnc.Mode.SLOW\nnc.ManagerCPU()\nnc.other(1).thing"),
        ast.parse("from native.core import count\nfrom elsewhere import nothing"),
    ]
    uses = used(trees, "native")
    found = merged(bound([source], "native.core"), uses)
    text = table_of("native", "bindings", found)
    assert text.splitlines()[3:] == [
        "FAST SAFE other count(*) named(*)",
        "class Key(*)",
        "    get(*)",
        "class ManagerCPU(*)",
        "    size(*)",
        "class Mode(*)",
        "    FAST SAFE SLOW",
    ]


# the spconv that is installed

RUN = """
import importlib, inspect, json, pkgutil, sys
import spconv
names = {}
for found in pkgutil.walk_packages(spconv.__path__, "spconv.", onerror=lambda _: None):
    skipped = ("spconv.core_cc", "spconv.benchmark", "spconv.gencode", "spconv.build")
    if found.name.startswith(skipped) or found.name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(found.name)
    except ImportError:  # needs a build for CUDA
        continue
    names[found.name] = [
        name for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == found.name and not name.startswith("_")
    ]
json.dump([spconv.__version__, spconv.__path__[0], names], sys.stdout)
"""


@pytest.fixture(scope="module")
def installed():
    pytest.importorskip("spconv.cppconstants")
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_table_of_spconv_lists_what_its_modules_define_when_they_run(installed):
    version, _, modules = installed
    listed = {entry.full_name for entry in table.entries("spconv", version)}
    assert sum(map(len, modules.values())) > 100
    for module, names in modules.items():
        assert module in listed and [n for n in names if f"{module}.{n}" not in listed] == []


def test_the_table_of_spconv_is_that_of_its_files(installed, tmp_path, monkeypatch):
    """Of a build for CPUs the compiled part is smaller; its Python files are the same. What modules
    import from one another is listed: programs take names from wherever they are."""
    version, folder, _ = installed
    stored = [e for e in table.entries("spconv", version) if e.module.startswith("spconv")]
    modules = Release(pathlib.Path(folder), imports=True).modules([], [])
    (tmp_path / "toy-5.txt").write_text(table_of("spconv", "installed", modules))
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    table.entries.cache_clear()
    found = table.entries("toy", "5")

    def python(entries):
        compiled = ("spconv.core_cc", "spconv.utils.Point2Voxel")
        names = {e for e in entries if not e.full_name.startswith(compiled)}
        return {e for e in names if not e.full_name.endswith("MainUnitTest")}  # compiled, too

    assert len(found) > 1000 and python(found) == python(stored)
    table.entries.cache_clear()
