"""What `python -m sparse_bridge cache show|clear` does: the winners of tuning on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
from rich.console import Console

from .. import folders
from ..core.tuning.kernel_hash import kernel_hash
from ..core.tuning.tune_cache import DIRECTIONS, CacheFileError, Stamp, Winners, decode, shipped_folder
from ..kernels.runtime import target as targets
from ..native import build
from ..tables import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.abc import Traversable

_PATTERNS = ("*.json", "*.json.aside", ".*.json.tmp")


def collect() -> dict[str, Any]:
    """What `show` shows, as JSON values."""
    tuned = sorted(shipped_folder().iterdir(), key=lambda path: path.name)
    folder = folders.cache()
    return {
        "folder": str(folder),
        "kernels": kernel_hash(),
        "triton": installed_triton(),
        "stored": [_facts(path) for path in _files(folder)],
        "shipped": [_facts(path, shipped=True) for path in tuned if path.name.endswith(".json")],
    }


def installed_triton() -> str:
    """The version that stamps name; empty without Triton."""
    return ".".join(map(str, targets.triton_version() or ()))


def _files(folder: Path) -> list[Path]:
    return sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))


def _facts(path: Path | Traversable, shipped: bool = False) -> dict[str, Any]:
    """What a file holds, and whether tuning reads it here. shipped: it came with the package."""
    facts: dict[str, Any] = {"file": path.name, "problem": None, "winners": {}, "groups": {}}
    try:
        text = path.read_text(encoding="utf-8")
        facts["bytes"] = len(text.encode())
        stamp, winners, groups = decode(text)
    except (OSError, UnicodeDecodeError, CacheFileError) as error:
        return {**facts, "problem": str(error)}
    facts |= dataclasses.asdict(stamp)
    facts["unread"] = unread(stamp, shipped)
    facts["current"] = facts["unread"] is None
    facts["winners"] = _plain(winners)
    facts["groups"] = {key: dataclasses.asdict(choice) for key, choice in groups.items()}
    return facts


def unread(stamp: Stamp, shipped: bool = False) -> str | None:
    """Why this process does not read a file; None where it does, on the device of the stamp. Shipped winners serve any
    kernels and Triton: `tune_cache.shipped` looks at the device alone."""
    if stamp.kernels != kernel_hash() and not shipped:
        return "not read: other kernels made it"
    if not installed_triton():
        return "not read: there is no Triton here, and layers on a CPU need none"
    return None if shipped or stamp.triton == installed_triton() else f"not read: made for Triton {stamp.triton}"


def _state(file: dict[str, Any]) -> str:
    """How a file stands to this process, for its row."""
    if file["unread"]:
        return str(file["unread"])
    others = ["other kernels"] * (file["kernels"] != kernel_hash())
    others += [f"Triton {file['triton']}"] * (file["triton"] != installed_triton())
    return f"read; tuned with {' and '.join(others)}" if others else "current"


def _plain(winners: Winners) -> dict[str, Any]:
    return {
        direction: {bucket: dataclasses.asdict(winner) for bucket, winner in buckets.items()}
        for direction, buckets in winners.items()
        if buckets
    }


def run_show(args: argparse.Namespace) -> int:
    """Print the stored and the shipped winners."""
    console = Console(emoji=False)
    facts = collect()
    if args.json:
        console.print_json(json.dumps(facts))
        return 0
    console.print(f"folder: {facts['folder']}", markup=False, soft_wrap=True)
    versions = f"kernels {facts['kernels']}, Triton {facts['triton'] or 'missing'}"
    console.print(f"this process: {versions}", markup=False, highlight=False)
    for name, title in (("stored", "Stored"), ("shipped", "Shipped with the package")):
        if not facts[name]:
            console.print(f"{title}: nothing.")
            continue
        tables = [_files_table(title, facts[name])]
        if args.buckets:
            tables += [_buckets_table(facts[name]), _groups_table(facts[name])]
        sys.stdout.write("".join(table.plain() + "\n" for table in tables))
    return 0


_FILE = (
    Column("file", True),
    Column("device", True, 1),
    Column("units", spare=5),
    Column("Triton", spare=2),
    Column("kernels", True, 3),
    *map(Column, DIRECTIONS),
    Column("groups", spare=6),
    Column("KiB", spare=4),
    Column("state", True),
)
_BUCKET = (
    Column("device", True, 3),
    Column("direction", True),
    Column("bucket", True),
    Column("tile", True, 1),
    Column("us"),
    Column("default"),
    Column("timed", spare=2),
)
_GROUP = (Column("device", True, 3), Column("group", True), Column("dataflows", True), Column("us"), Column("by rule"))


def _files_table(title: str, files: Iterable[dict[str, Any]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for file in files:
        size = f"{file.get('bytes', 0) / 1024:.1f}"
        if file["problem"]:
            rows.append((file["file"], *["-"] * 8, size, f"unusable: {file['problem']}"))
            continue
        counts = [str(len(file["winners"].get(direction, ()))) for direction in DIRECTIONS]
        counts.append(str(len(file["groups"])))
        device = f"{file['device']} ({file['arch']})"
        build = (str(file["compute_units"]), file["triton"], file["kernels"][:8])
        rows.append((file["file"], device, *build, *counts, size, _state(file)))
    return Table(title, _FILE, rows)


def _buckets_table(files: Iterable[dict[str, Any]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for file in files:
        for direction, buckets in file["winners"].items():
            for bucket, winner in buckets.items():
                tile = " ".join(f"{k}={v}" for k, v in winner["tile"].items() if v)
                times = [f"{winner[key]:.1f}" for key in ("microseconds", "default_microseconds")]
                rows.append((file["device"], direction, bucket, tile, *times, str(winner["tested"])))
    return Table("", _BUCKET, rows)


def _groups_table(files: Iterable[dict[str, Any]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for file in files:
        for key, group in file["groups"].items():
            flows = ", ".join(f"{flow} for {name}" for name, flow in group["flows"].items())
            times = (f"{group[name]:.1f}" for name in ("microseconds", "rule_microseconds"))
            rows.append((file["device"], key, flows or "the rules stay", *times))
    return Table("", _GROUP, rows)


def run_clear(args: argparse.Namespace) -> int:
    """Delete stored winners, and libraries of the helper in C."""
    folder = folders.cache()
    files = [path for path in _files(folder) if not args.stale or not _facts(path).get("current")]
    files += [path for path, current in build.stored() if not (args.stale and current)]
    size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # another process clears, too
            size += path.stat().st_size
            path.unlink()
    if not args.stale:
        for path in (folder / "locks").glob("*.lock"):
            with contextlib.suppress(filelock.Timeout, OSError), filelock.FileLock(path, timeout=0):
                path.unlink(missing_ok=True)
    if args.json:
        facts = {"folder": str(folder), "files": [path.name for path in files], "bytes": size}
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    Console(emoji=False).print(
        f"{len(files)} files deleted ({size / 1024:.1f} KiB) in {folder}", markup=False, highlight=False, soft_wrap=True
    )
    return 0
