"""What the audit finds absent or taken differently without a reason; `gaps.txt` is what is known.

`python -m tests.api_coverage.gaps` writes it anew.
"""

from __future__ import annotations

import pathlib

from sparse_bridge.tools.api_coverage.check import ABSENT, DIFFERENT, Surface
from sparse_bridge.tools.api_coverage.command import collect

FILE = pathlib.Path(__file__).with_name("gaps.txt")


def text(surfaces: list[Surface]) -> str:
    """One line per owner of absent names, and per name that is taken differently."""
    lines = ["# Known gaps; `python -m tests.api_coverage.gaps` writes them anew."]
    for surface in surfaces:
        lines += ["", f"[{surface.framework} {surface.release}]"]
        owners: dict[str, list[str]] = {}
        for finding in surface.of(ABSENT):
            owner, _, name = finding.entry.full_name.rpartition(".")
            owners.setdefault(owner, []).append(name)
        lines += [f"{owner}: {' '.join(names)}" for owner, names in owners.items()]
        for finding in surface.of(DIFFERENT):
            lines.append(f"~{finding.entry.full_name}: {finding.note}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(collect([])), encoding="utf-8")
