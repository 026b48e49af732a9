"""The import graph of the package: no cycle between files, no arrow up, no crowded folder."""

from __future__ import annotations

import pathlib
from collections import Counter

import pytest

import sparse_bridge
from sparse_bridge.native import reads

from .import_graph import FLOOR_OF, arrows_up, cycles, files_per_folder, imports, room, sources

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
MOST_FILES = 20
# Files of each room that the helper in C reads of, though `native` is below them.
READ_BY_C = {
    "kernels.runtime": 4,
    "kernels.tiles": 1,
    "kernels.maps": 2,
    "kernels.gemm": 5,
    "core.geometry": 1,
    "core.device": 3,
    "core.maps": 4,
    "core.conv": 10,
    "core.prefetch": 1,
}


@pytest.fixture(scope="module")
def graph():
    return imports(PACKAGE)


def test_the_whole_package_is_read(graph):
    assert len(graph) > 200 and sum(map(len, graph.values())) > 700
    floors = {FLOOR_OF[room(name)] for name in graph if room(name) in FLOOR_OF}
    floors |= {FLOOR_OF["core.prefetch"], FLOOR_OF["core.capture"]}  # the folders that may be deleted
    assert len(floors) == len(set(FLOOR_OF.values())), "a floor is empty"
    assert "sparse_bridge.settings" in graph["sparse_bridge.tools.doctor"]  # from . import settings
    assert "sparse_bridge.tools.doctor" in graph["sparse_bridge.__main__"]  # in a function
    offsets, geometry = ("sparse_bridge.core.geometry.offsets", "sparse_bridge.kernels.maps.coord_key")
    assert geometry in graph[offsets]  # for type checkers


def test_no_cycle_between_files(graph):
    assert cycles(graph) == []


def test_no_arrow_up(graph):
    unknown = {room(name) for name in graph} - FLOOR_OF.keys() - {"", "core", "kernels"}
    assert not unknown, f"no floor is named for {sorted(unknown)}"
    assert arrows_up(graph) == []


def test_arrows_up_that_c_has_are_counted(graph):
    """C imports nothing, and knows its twins all the same: what it reads stands in for imports."""
    home = "sparse_bridge.native.reads"
    owners = [owner.where for owner in reads.OWNERS.values()] + [where for where, _ in reads.VALUES.values()]
    read = {f"sparse_bridge{where.partition(':')[0]}" for where in owners if where.startswith(".")}
    rooms = {room(name) for name in graph}
    read = {name for name in read if room(name) != "core.prefetch" or "core.prefetch" in rooms}  # it may be deleted
    assert read <= graph.keys() and not read & graph[home]
    up = arrows_up({home: read})
    assert Counter(room(name) for _, name in up) == {name: n for name, n in READ_BY_C.items() if name in rooms}
    assert read - {name for _, name in up} == {"sparse_bridge.settings", "sparse_bridge.native.calls"}


def test_no_folder_is_crowded():
    counts = files_per_folder(PACKAGE)
    assert counts["sparse_bridge/core/geometry"] >= 3
    crowded = {folder for folder, count in counts.items() if count > MOST_FILES}
    assert not crowded, {folder: counts[folder] for folder in crowded}


@pytest.fixture
def planted(tmp_path):
    """A package to plant faults in: write(path, source), then read it."""
    package = tmp_path / "sparse_bridge"

    def write(path: str, source: str) -> pathlib.Path:
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (package, *file.parents):
            if folder.is_relative_to(package):
                (folder / "__init__.py").touch()
        file.write_text(source)
        return package

    return write


def test_a_planted_cycle_is_found(planted):
    planted("core/maps/a.py", "from .b import x\n")
    planted("core/maps/c.py", "import sparse_bridge.core.maps.a\n")
    package = planted("core/maps/b.py", "def late():\n    from . import c\n")
    names = [f"sparse_bridge.core.maps.{name}" for name in "abc"]
    assert cycles(imports(package)) == [names]
    planted("core/maps/b.py", "if TYPE_CHECKING:\n    from . import c\n")
    assert cycles(imports(package)) == [names]
    planted("core/maps/b.py", "x = 1\n")
    assert cycles(imports(package)) == []


def test_a_planted_arrow_is_found(planted):
    planted("core/maps/b.py", "x = 1\n")
    planted("kernels/gemm/a.py", "def late():\n    from ...core.maps.b import x\n")
    package = planted("core/conv/c.py", "from ..maps import b\n")
    graph = imports(package)
    assert arrows_up(graph) == [("sparse_bridge.kernels.gemm.a", "sparse_bridge.core.maps.b")]
    planted("kernels/gemm/a.py", "if TYPE_CHECKING:\n    from ...core.maps.b import x\n")
    assert arrows_up(imports(package)) == arrows_up(graph)
    planted("tools/harness/d.py", "from ...core.maps import b\n")
    for engine in ("adapters", "core/conv", "kernels/gemm"):
        dots = "." * (engine.count("/") + 2)
        planted(f"{engine}/e.py", f"def late():\n    from {dots}tools.harness import d\n")
    assert [name for name, _ in arrows_up(imports(package))] == [
        "sparse_bridge.adapters.e",
        "sparse_bridge.core.conv.e",
        "sparse_bridge.kernels.gemm.a",
        "sparse_bridge.kernels.gemm.e",
    ]
    planted("attic/d.py", "from ..core.maps import b\n")
    with pytest.raises(KeyError, match="attic"):
        arrows_up(imports(package))


def test_a_planted_crowd_is_found(planted):
    for number in range(MOST_FILES):
        package = planted(f"core/ops/f{number}.py", "")
        planted(f"adapters/x/standin/y/f{number}.py", "")
    assert files_per_folder(package)["sparse_bridge/core/ops"] == MOST_FILES + 1
    assert not any("standin" in name for name in sources(package))
