"""The import graph of a package, read from its sources: imports in functions count, and so do
those for type checkers: a type that a file names is something that its reader has to know."""

from __future__ import annotations

import ast
import pathlib
from collections import Counter

__all__ = ["arrows_up", "cycles", "files_per_folder", "imports", "room"]

Graph = dict[str, set[str]]

# From the lowest to the highest; what stands in one line may import each other, without a cycle.
FLOORS = (
    (
        *(
            "_version",
            "errors",
            "folders",
            "hooks",
            "log",
            "memory",
            "names",
            "native",
            "refusals",
            "releases",
            "settings",
        ),
        *("policy", "state", "tables", "tolerances", "workers"),
    ),
    ("kernels.runtime",),
    ("kernels.tiles",),
    ("kernels.maps",),
    ("kernels.gemm",),
    ("kernels.ops",),
    ("core.arguments", "core.geometry", "core.late_maps", "core.served_forward"),
    ("core.closed_world",),
    ("core.device",),
    ("core.tuning",),
    ("core.maps",),
    ("core.conv",),
    ("core.traced",),
    ("core.ops",),
    ("core.compile",),
    ("core.prefetch",),
    ("core.capture",),
    ("core.warmup",),
    ("core.functional",),
    ("adapters", "checkpointing"),
    ("compile", "export", "startup"),
    ("tools", "profiling", "optimization"),
    ("__main__", "commands"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def sources(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Files by module name; the trees that stand in for a framework mirror that one's files."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if "standin" not in parts:
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(package: pathlib.Path) -> Graph:
    """Modules of the package that each of its modules imports."""
    files = sources(package)
    return {name: _imported(name, path, files) - {name} for name, path in files.items()}


def _imported(name: str, path: pathlib.Path, files: dict[str, pathlib.Path]) -> set[str]:
    home = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = home.split(".")[: len(home.split(".")) + 1 - node.level]
            origin = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found.update(one if one in files else origin for one in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & files.keys()


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def walk(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                walk(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == index[name]:
            start = stack.index(name)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            walk(name)
    return sorted(found)


def room(name: str) -> str:
    """The sub-package or top-level module of a module, as `FLOORS` names it."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2] if parts and parts[0] in ("core", "kernels") else parts[:1])


def arrows_up(graph: Graph) -> list[tuple[str, str]]:
    """Imports of a higher floor. Folders' own `__init__`, which everything in them runs after, and
    modules of no known floor are errors by themselves: KeyError."""
    apis = ("", "core", "kernels")
    return sorted(
        (name, other)
        for name in graph
        for other in graph[name]
        if room(name) not in apis and room(other) not in apis and FLOOR_OF[room(other)] > FLOOR_OF[room(name)]
    )


def files_per_folder(package: pathlib.Path) -> Counter[str]:
    """Python files by folder, `__init__.py` included."""
    folders = (path.parent.relative_to(package.parent) for path in sources(package).values())
    return Counter("/".join(folder.parts) for folder in folders)
