"""`python -m sparse_bridge surface`: the frameworks' public names, and how each is answered."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from ...errors import SettingError
from ...names import meant
from ...tables import Column, Table
from .check import CHANGED, EXPLAINED, PRESENT, Surface, check
from .markdown import page
from .table import releases

__all__ = ["add_parser", "collect", "facts_of"]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "surface",
        help="count and list what of each framework's public surface is answered",
        description="Look for the public names, members and parameters of the frameworks in what "
        "answers their imports. Exit status 1 where something is absent, or taken differently, "
        "without a reason.",
    )
    parser.add_argument("framework", nargs="*", help="which (default: all)")
    parser.add_argument(
        "--all", action="store_true", help="list every name (default: counts, and names without a reason)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="machine-readable output")
    output.add_argument("--markdown", action="store_true", help="the page docs/surface.md")
    parser.set_defaults(func=_run)
    return parser


def collect(frameworks: list[str]) -> list[Surface]:
    """The surfaces of all releases of some frameworks, of all without names.

    Raises: SettingError (an unknown framework), LifecycleError (a real one is imported here),
    ModuleNotFoundError (no torch).
    """
    known = list(dict.fromkeys(framework for framework, _, _ in releases()))
    for name in frameworks:
        if name not in known:
            raise SettingError(f"framework {name!r} is unknown; expected {', '.join(known)}.{meant(name, known)}")
    importlib.import_module("torch")  # else every module that needs it would count as absent
    return [check(*release) for release in releases() if not frameworks or release[0] in frameworks]


def _run(args: argparse.Namespace) -> int:
    surfaces = collect(args.framework)
    if args.markdown:
        sys.stdout.write(page(surfaces))
    elif args.json:
        json.dump([facts_of(surface) for surface in surfaces], sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(_counts(surfaces).plain() + "\n")
        for surface in surfaces:
            _print(surface, args.all)
    return 1 if any(surface.unexplained for surface in surfaces) else 0


def facts_of(surface: Surface) -> dict[str, Any]:
    """Framework, release, what the names are from, and by state {full name: reason or note}."""
    names: dict[str, dict[str, str]] = {}
    for finding in surface.findings:
        said = finding.reason or finding.note
        names.setdefault(finding.state, {})[finding.entry.full_name] = said
    listed = [f"{origin.title}: {origin.source}" for origin in surface.origins]
    return {"framework": surface.framework, "release": surface.release, "from": listed, **names}


_COLUMNS = (
    Column("framework", True),
    Column("release", True),
    Column("names"),
    Column("present"),
    Column("differently, with a reason", spare=2),
    Column("absent, with a reason", spare=1),
    Column("without a reason"),
)


def _counts(surfaces: list[Surface]) -> Table:
    rows = []
    for surface in surfaces:
        parts = (surface.findings, surface.of(PRESENT), surface.of(CHANGED), surface.of(EXPLAINED), surface.unexplained)
        rows.append((surface.framework, surface.release, *(str(len(part)) for part in parts)))
    remark = "--all lists every name and reason, docs/surface.md has them by release."
    return Table("Public names of the frameworks", _COLUMNS, rows, remark=remark)


def _print(surface: Surface, everything: bool) -> None:
    """The names that nobody has given a reason for, or all of them."""
    findings = surface.findings if everything else surface.unexplained
    if not findings:
        return
    lines = [f"{surface.framework} {surface.release}"]
    lines += [f"  from {origin.title}: {origin.source}" for origin in surface.origins]
    for finding in findings:
        said = [finding.entry.full_name, finding.note, finding.reason]
        lines.append(f"  {finding.state:20} " + ": ".join(part for part in said if part))
    sys.stdout.write("\n".join(lines) + "\n")
