"""`docs/surface.md`, written from what the command finds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from ..adapters import base
from .check import CHANGED, EXPLAINED, PRESENT, Finding, Surface

__all__ = ["page"]

_HEAD = """\
# The frameworks' surface

Every public name of each release (modules, functions, classes, methods, and parameters with their
order and defaults), and whether `import` of the framework answers it here. Attributes that objects
get when they are made are not listed. Written by `python -m sparse_bridge surface --markdown`; a
test keeps it current, and allows no name to be absent without a reason.

| release | names | present | taken differently | absent, with a reason | absent without |
|---|---|---|---|---|---|
"""
_WIDTH = 124


def page(surfaces: list[Surface]) -> str:
    """The whole page."""
    text = _HEAD
    for surface in surfaces:
        counts = [len(surface.findings), len(surface.of(PRESENT)), len(surface.of(CHANGED))]
        counts += [len(surface.of(EXPLAINED)), len(surface.unexplained)]
        text += f"| {_title(surface)} | " + " | ".join(map(str, counts)) + " |\n"
    for surface in surfaces:
        text += f"\n## {_title(surface)}\n"
        text += _reasons("Absent on purpose", surface.of(EXPLAINED))
        text += _reasons("Taken differently", surface.of(CHANGED))
        text += _reasons("Absent", surface.unexplained)
        text += _modules(surface.of(PRESENT))
    return text


def _title(surface: Surface) -> str:
    return f"{base.load(surface.framework).title} {surface.release}"


def _reasons(title: str, findings: list[Finding]) -> str:
    """Names under their reasons."""
    if not findings:
        return ""
    grouped: dict[str, list[str]] = {}
    for finding in findings:
        grouped.setdefault(finding.note, []).append(finding.entry.full_name)
    items = (f"- {reason}: {_names(names)}" for reason, names in grouped.items())
    return f"\n{title}:\n\n" + "".join(_wrapped(item, "  ") for item in items)


def _modules(findings: list[Finding]) -> str:
    """Present names, one paragraph per module; members behind their class."""
    modules: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        owner, _, member = finding.entry.name.partition(".")
        names = modules.setdefault(finding.entry.module, {})
        if owner:
            names.setdefault(owner, []).extend([member] if member else [])
    text = "\nPresent:\n\n"
    for module, names in modules.items():
        shown = [
            f"`{name}`" + (f" ({', '.join(members)})" if members else "")
            for name, members in names.items()
        ]
        text += _wrapped(f"- **`{module}`** {', '.join(shown)}".rstrip(), "  ")
    return text


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) + "\n"  # fmt: skip
