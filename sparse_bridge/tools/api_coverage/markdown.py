"""`docs/surface.md`, written from what the command finds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from ...adapters import base
from .check import ABSENT, CHANGED, DIFFERENT, EXPLAINED, PRESENT, Finding, Surface

__all__ = ["page"]

_HEAD = """\
# Names of each framework

For those who miss a name, or want to know whether one is taken as upstream takes it: every public
name, present or absent, and why.

Public names of the frameworks, and how `import` of the framework answers them here: modules,
functions, classes with their members and bases, the attributes of objects, parameters with
their order and defaults.

A program (`tools/public_names`) makes the lists from the files of a release, which it does not run:
every name that they write out and that has no leading underscore, for spconv also what its modules
import from one another. It does not see names that are only made while the files run. What a class
inherits is listed at its base. "Documents, not the release" means that the release could not be
had: such a list holds what documents and projects name, and more may be missing.

- *present*: it is there, and takes what it takes upstream. (Of `apply` of an autograd function, the
  number of arguments is compared: they go by position.)
- *taken differently*: it is there, with other parameters, of another kind or of another base.
- *absent*: it is not there, or does nothing but refuse.

Written by `python -m sparse_bridge surface --markdown`. Tests keep the page current, and hold the
list of what has no reason: they fail where that list grows, and where a name can be taken off it.

| release | names | present | differently, with a reason | absent, with a reason | without |
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
        text += _listed("Listed from", (f"{o.title}: {o.source}" for o in surface.origins))
        text += _listed("Absent without a reason", _owners(surface.of(ABSENT)))
        text += _listed("Taken differently without a reason", _differences(surface.of(DIFFERENT)))
        text += _listed("Absent on purpose", _reasons(surface.of(EXPLAINED), _owners))
        text += _listed("Taken differently on purpose", _reasons(surface.of(CHANGED), _differences))
        text += _listed("Present", _modules(surface.of(PRESENT)))
    return text


def _title(surface: Surface) -> str:
    return f"{base.load(surface.framework).title} {surface.release}"


def _listed(title: str, items: Iterable[str]) -> str:
    text = "".join(_wrapped(f"- {item}", "  ") for item in items)
    return f"\n{title}:\n\n{text}" if text else ""


def _owners(findings: Iterable[Finding]) -> list[str]:
    """Names behind what they belong to."""
    owners: dict[str, list[str]] = {}
    for finding in findings:
        owner, _, name = finding.entry.full_name.rpartition(".")
        owners.setdefault(owner, []).append(f"`{name}`")
    return [f"`{owner}`: {', '.join(names)}" for owner, names in owners.items()]


def _differences(findings: Iterable[Finding]) -> list[str]:
    return [f"`{finding.entry.full_name}`: {finding.note}" for finding in findings]


def _reasons(findings: Iterable[Finding], render: Callable[[list[Finding]], list[str]]) -> Iterable[str]:
    """Names behind their reasons."""
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(finding.reason, []).append(finding)
    return (f"*{reason}*: {'; '.join(render(names))}" for reason, names in grouped.items())


def _modules(findings: Iterable[Finding]) -> Iterable[str]:
    """One item per module; members behind their class."""
    modules: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        owner, _, member = finding.entry.name.partition(".")
        names = modules.setdefault(finding.entry.module, {})
        if owner:
            names.setdefault(owner, []).extend([member] if member else [])
    for module, names in modules.items():
        lines = [f"`{name}`" + (f" ({', '.join(members)})" if members else "") for name, members in names.items()]
        yield f"**`{module}`** {', '.join(lines)}".rstrip()


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
