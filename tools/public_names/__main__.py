"""The command, and the text of a table."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path

from .compiled import Modules, bound, merged, used
from .members import Name
from .release import Release

WIDTH = 100


def table(title: str, source: str, modules: Modules) -> str:
    """A part of a table: a line on where it is from, then the modules with their counts."""
    total = sum(count(names.values()) for names in modules.values())
    day = datetime.date.today().isoformat()
    found = [f"# {title}: {source}; {len(modules)} modules, {total} names, listed on {day}."]
    for module, names in sorted(modules.items()):
        found += ["", f"[{module}]  # {count(names.values())}", *lines(names.values())]
    return "\n".join(found) + "\n"


def count(names: Iterable[Name]) -> int:
    return sum(1 + count(name.members.values()) for name in names)


def lines(names: Iterable[Name], indent: str = "") -> Iterator[str]:
    """Names with parameters stand alone, others share a line."""
    row = ""
    order = sorted(names, key=lambda n: (n.kind == "class", n.kind == "function", n.name))
    for name in order:
        alone = name.kind == "class" or len(name.parameters) > 3
        if row and (alone or len(row) + len(str(name)) >= WIDTH):
            yield row
            row = ""
        if alone:
            yield f"{indent}{name}"
            yield from lines(name.members.values(), indent + "    ")
        else:
            row = f"{row} {name}" if row else f"{indent}{name}"
    if row:
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="List the public names of a release.")
    parser.add_argument("folder", type=Path, help="a package of .py or .pyi files")
    parser.add_argument("--title", required=True, help="name and version")
    parser.add_argument("--source", required=True, help="what it is: wheel, sdist, ...")
    parser.add_argument("--only", action="append", default=[], help="modules (a pattern)")
    parser.add_argument("--skip", action="append", default=[], help="modules (a pattern)")
    parser.add_argument("--companion", default="", help="a compiled package that belongs to it")
    parser.add_argument("--imports", action="store_true", help="list what modules that are no packages import, too")
    parser.add_argument("--uses", help="list what the files use of this package instead")
    parser.add_argument("--bindings", nargs="+", type=Path, default=[], help="its C++ bindings")
    given = parser.parse_args()
    release = Release(given.folder, given.companion, given.imports)
    modules = release.modules(given.only, given.skip)
    if given.uses:
        uses = used([release.trees[module] for module in modules], given.uses)
        modules = merged(bound(given.bindings, given.uses), uses)
    print(table(given.title, given.source, modules), end="")


if __name__ == "__main__":
    main()
