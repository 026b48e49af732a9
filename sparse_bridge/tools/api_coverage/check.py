"""Comparing a release's table with the stand-in that answers it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from ... import settings
from ...adapters import lifecycle
from .objects import has_attribute, refuses
from .table import Entry, Origin, Parameter, Reason, entries, origins, reasons

__all__ = ["Finding", "Surface", "check"]

PRESENT, EXPLAINED, ABSENT, DIFFERENT = "present", "absent on purpose", "absent", "different"
CHANGED = "different on purpose"
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class Finding:
    """How one name is answered. note: what is wrong. reason: why, where there is one."""

    entry: Entry
    state: str
    note: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Surface:
    """All findings of one release. origins: what its names were listed from."""

    framework: str
    release: str
    findings: tuple[Finding, ...]
    origins: tuple[Origin, ...] = ()

    def of(self, *states: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.state in states]

    @property
    def unexplained(self) -> list[Finding]:
        return self.of(ABSENT, DIFFERENT)


def check(framework: str, release: str, profile: str | None) -> Surface:
    """Enable the stand-in as that release and look for every name of its table.

    Raises: LifecycleError if the real framework is imported in this process.
    """
    why = reasons(framework)
    with settings.override(mode="standin"), lifecycle.enable(framework, mode="standin", profile=profile):
        findings = tuple(finding_of(entry, why) for entry in entries(framework, release))
    return Surface(framework, release, findings, origins(framework, release))


def finding_of(entry: Entry, why: tuple[Reason, ...]) -> Finding:
    try:
        member = _resolve(entry)
        absent = "is there to refuse" if refuses(member) else ""
    except (ImportError, AttributeError, NotImplementedError) as error:
        absent = f"{type(error).__name__}: {error}"
    wrong = "" if absent else "; ".join(_wrong(entry, member))
    if not absent and not wrong:
        return Finding(entry, PRESENT)
    for reason in why:
        if reason.of_parameters == (not absent) and reason.fits(entry.full_name):
            return Finding(entry, CHANGED if wrong else EXPLAINED, wrong, reason.text)
    return Finding(entry, DIFFERENT if wrong else ABSENT, wrong or absent)


def _resolve(entry: Entry) -> Any:
    member: Any = importlib.import_module(entry.module)
    for part in entry.name.split(".") if entry.name else ():
        owner, member = member, getattr(member, part, _NOTHING)
        if part == "apply" and member is not _NOTHING:
            # of a function of autograd: it takes what is computed from
            member = getattr(owner, "compute", getattr(owner, "forward", member))
        if member is _NOTHING and not (entry.kind == "attribute" and has_attribute(owner, part)):
            return getattr(owner, part)  # raises, in the owner's own words
    return member


def _signature(member: Any) -> inspect.Signature:
    """The signature by which the profile in force reads positional arguments."""
    call = getattr(member, "__init__", None) if isinstance(member, type) else member
    in_force = getattr(call, "signature_in_force", None)
    return inspect.signature(member) if in_force is None else in_force()


def _wrong(entry: Entry, member: Any) -> Iterator[str]:
    """How `member` differs from its entry in a table."""
    if entry.kind == "class" and not isinstance(member, type):
        yield "is no class"
    elif entry.kind == "function" and not callable(member):
        yield "cannot be called"
    elif entry.kind in ("property", "attribute") and inspect.isfunction(member):
        yield "is a method"
    elif entry.parameters is not None:
        yield from _compare(entry, member)
    for base in entry.bases if isinstance(member, type) else ():
        module, _, name = base.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):  # its absence is told of itself
            above = getattr(importlib.import_module(module), name)
            if isinstance(above, type) and not issubclass(member, above):
                yield f"is no {name}"


def _compare(entry: Entry, member: Any) -> Iterator[str]:
    """What is wrong with the parameters of `member`: each must stand at its index with its name and
    default; further ones may follow if they are optional."""
    assert entry.parameters is not None
    try:
        ours = list(_signature(member).parameters.values())
    except (TypeError, ValueError):  # not written in Python: no names to compare
        return
    if ours and ours[0].name in ("self", "ctx") and "." in entry.name:
        del ours[0]
    kinds = inspect.Parameter
    named = {p.name: p for p in ours}
    positional = [p for p in ours if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = any(p.kind is kinds.VAR_POSITIONAL for p in ours)
    anything = any(p.kind is kinds.VAR_KEYWORD for p in ours)
    wanted = [p for p in entry.parameters if p.kind == ""]
    if entry.name.endswith(".apply"):  # autograd gives arguments by position: names do not matter
        if not rest and len(positional) != len(wanted):
            yield f"takes {len(positional)} arguments, not {len(wanted)}"
        return
    for index, parameter in enumerate(wanted):
        if index >= len(positional):
            if not rest:
                yield f"takes no {parameter.name!r} at place {index + 1}"
                return
            break  # read at the call, by the rules of the profile
        if positional[index].name != parameter.name:
            yield f"place {index + 1} is {positional[index].name!r}, not {parameter.name!r}"
            return
        yield from _compare_default(parameter, positional[index])
    for parameter in entry.parameters:
        if parameter.kind == "keyword":
            if parameter.name in named:
                yield from _compare_default(parameter, named[parameter.name])
            elif not anything:
                yield f"takes no keyword {parameter.name!r}"
    if any(p.kind == "*" for p in entry.parameters):
        return
    for extra in positional[len(wanted) :]:
        if extra.default is kinds.empty:
            yield f"needs a further {extra.name!r}"


def _compare_default(wanted: Parameter, ours: inspect.Parameter) -> Iterator[str]:
    if wanted.default in (None, "..."):
        if wanted.default is None and ours.default is not inspect.Parameter.empty:
            return  # optional here, needed there
        if wanted.default == "..." and ours.default is inspect.Parameter.empty:
            yield f"{wanted.name!r} is needed"
        return
    if ours.default is inspect.Parameter.empty:
        yield f"{wanted.name!r} is needed, not {wanted.default}"
    elif not _equal(wanted.default or "", ours.default):
        yield f"{wanted.name!r} defaults to {ours.default!r}, not {wanted.default}"


def _equal(source: str, value: Any) -> bool:
    """Whether a default in a table is this value; members and dtypes go by their last name."""
    try:
        wanted = ast.literal_eval(source)
    except ValueError:
        last = source.rpartition(".")[2]
        if isinstance(value, enum.Enum):  # by any of its names
            return type(value).__members__.get(last) is value
        name = getattr(value, "__name__", str(value))
        return name.rpartition(".")[2] == last
    if isinstance(wanted, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(wanted) == list(value)
    return bool(wanted == value) and isinstance(wanted, bool) == isinstance(value, bool)
