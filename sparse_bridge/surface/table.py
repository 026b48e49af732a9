"""Reading the tables: which names a release has, and the reasons for those that are left out.

A table lists modules and their names:

    [MinkowskiEngine]
    MinkowskiReLU MinkowskiELU
    SparseTensor(features, coordinates=None, tensor_stride=1)
        F C dense(shape=None, contract_stride=True)

Indented names are members of the class above them. Parameters follow a name where they matter; a
default of `...` is any.  A file of reasons has one `pattern: reason` per line, where the pattern is
that of a full name (`MinkowskiEngine.SparseTensor.dense`); a leading `~` speaks of parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import pathlib
import re
from collections.abc import Iterator

from ..adapters import base
from ..errors import SettingError

__all__ = ["Entry", "Parameter", "Reason", "entries", "reasons", "releases"]

FOLDER = pathlib.Path(__file__).parent / "tables"
# A name with or without parameters, which hold brackets of their own at most one deep.
_NAME = re.compile(r"([\w.]+)(\((?:[^()]|\([^()]*\))*\))?")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter; kind is "*", "**", "keyword" or "". default: its source, None without one."""

    name: str
    default: str | None = None
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name of a module, or `Class.member`. parameters: None where the table does not say."""

    module: str
    name: str
    parameters: tuple[Parameter, ...] | None = None

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why names that match `pattern` are absent, or have other parameters."""

    pattern: str
    text: str
    of_parameters: bool

    def fits(self, full_name: str) -> bool:
        return fnmatch.fnmatchcase(full_name, self.pattern)


@functools.cache
def releases() -> tuple[tuple[str, str, str | None], ...]:
    """(framework, release, profile that `enable()` takes for it) of every table, in the order of
    the adapters and their profiles."""
    found = []
    for framework in base.frameworks():
        here = []
        for file in FOLDER.glob(f"{framework.name}-*.txt"):
            release = file.stem.removeprefix(f"{framework.name}-")
            fits = [p for p in framework.profiles if f"{release}.".startswith(f"{p}.")]
            if release != "absent":
                here.append((framework.name, release, fits[0] if fits else None))
        order = [*framework.profiles, None]
        found += sorted(here, key=lambda made: (order.index(made[2]), made[1]))
    return tuple(found)


def _parameters(source: str) -> tuple[Parameter, ...]:
    arguments = ast.parse(f"def f{source}: pass").body[0].args  # type: ignore[attr-defined]
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    found = [Parameter(a.arg, d and ast.unparse(d)) for a, d in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, None, "*"))
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(a.arg, d and ast.unparse(d), "keyword"))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, None, "**"))
    return tuple(found)


def _lines(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("  #")[0].rstrip()
        if text and not text.startswith("#"):
            yield number, text


@functools.cache
def entries(framework: str, release: str) -> tuple[Entry, ...]:
    """The table of a release; a module is an entry without a name. Raises: SettingError."""
    file = FOLDER / f"{framework}-{release}.txt"
    found: list[Entry] = []
    module = owner = ""
    for number, line in _lines(file):
        if line.startswith("["):
            module, owner = line[1:-1], ""
            found.append(Entry(module, ""))
            continue
        names = list(_NAME.finditer(line))
        if not module or _NAME.sub("", line).strip():
            raise SettingError(f"{file.name}, line {number}: {line!r} is no list of names.")
        for match in names:
            name, parameters = match[1], match[2]
            if line.startswith(" "):
                name = f"{owner}.{name}"
            else:
                owner = name
            found.append(Entry(module, name, _parameters(parameters) if parameters else None))
    return tuple(found)


@functools.cache
def reasons(framework: str) -> tuple[Reason, ...]:
    """Why names of a framework are left out, or taken differently. Raises: SettingError."""
    file = FOLDER / f"{framework}-absent.txt"
    found = []
    for number, line in _lines(file):
        pattern, separator, text = line.partition(": ")
        if not separator:
            raise SettingError(f"{file.name}, line {number}: expected 'pattern: reason'.")
        found.append(Reason(pattern.removeprefix("~").strip(), text, pattern.startswith("~")))
    return tuple(found)
