"""Reading the tables: which names a release has, and the reasons for those that are left out.

`python -m public_names` (`tools/`) lists the public names of a release:

    # MinkowskiEngine 0.5.4: the sdist; 32 modules, 580 names, listed on 2026-11-26.

    [MinkowskiEngine.MinkowskiTensor]  # 59
    COORDINATE_KEY_DIFFERENT_ERROR sparse_tensor_operation_mode()
    class SparseTensor(features, coordinates=None, tensor_stride=1) < Tensor
        @F .unique_index dense(shape=None, contract_stride=True)

Behind a module stands how many names it has. Indented names are members of the class above
them: `@` is a property, `.` an attribute of its objects. What has brackets can be called, `(*)`
with parameters that are not known; a default of `...` is any. Behind `<` stand the classes that a
class inherits from. Tables of releases that could not be had are written by hand.

A file of reasons has one `pattern: reason` per line, where the pattern is that of a full name
(`MinkowskiEngine.SparseTensor.dense`); a leading `~` speaks of what is taken differently.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import pathlib
import re
from collections.abc import Iterator

from ...adapters import base
from ...errors import SettingError

__all__ = ["Entry", "Origin", "Parameter", "Reason", "entries", "origins", "reasons", "releases"]

FOLDER = pathlib.Path(__file__).parent / "tables"
# A name with or without parameters, which hold brackets of their own at most one deep.
NAME = re.compile(r"(class )?([@.]?)(\w[\w.]*)(\((?:[^()]|\([^()]*\))*\))?(?: < ([\w., ]+))?")
_KINDS = {"@": "property", ".": "attribute"}
_ORIGIN = re.compile(r"# (.+?): (.+); (\d+) modules, (\d+) names")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter; kind is "*", "**", "keyword" or "". default: its source, None without one."""

    name: str
    default: str | None = None
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name of a module, or `Class.member`. kind: "module", "class", "function", "property",
    "attribute", or "" where any will do. parameters: None where they are not known.
    bases: full names of the classes that it inherits from."""

    module: str
    name: str
    kind: str = ""
    parameters: tuple[Parameter, ...] | None = None
    bases: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a part of a table is from, and how much it lists."""

    title: str
    source: str
    modules: int
    names: int


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
    rows = []
    for framework in base.frameworks():
        here = []
        for file in FOLDER.glob(f"{framework.name}-*.txt"):
            release = file.stem.removeprefix(f"{framework.name}-")
            fits = [p for p in framework.profiles if f"{release}.".startswith(f"{p}.")]
            if release != "absent":
                here.append((framework.name, release, fits[0] if fits else None))
        order = [*framework.profiles, None]
        rows += sorted(here, key=lambda row: (order.index(row[2]), row[1]))
    return tuple(rows)


def _parameters(source: str) -> tuple[Parameter, ...]:
    arguments = ast.parse(f"def f{source}: pass").body[0].args  # type: ignore[attr-defined]
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    parameters = [Parameter(a.arg, d and ast.unparse(d)) for a, d in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, None, "*"))
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(Parameter(a.arg, d and ast.unparse(d), "keyword"))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, None, "**"))
    return tuple(parameters)


def _lines(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("  #")[0].rstrip()
        if text and not text.startswith("#"):
            yield number, text


@functools.cache
def origins(framework: str, release: str) -> tuple[Origin, ...]:
    """What a table was made from."""
    text = (FOLDER / f"{framework}-{release}.txt").read_text(encoding="utf-8")
    matches = (_ORIGIN.match(line) for line in text.splitlines())
    return tuple(Origin(m[1], m[2], int(m[3]), int(m[4])) for m in matches if m)


@functools.cache
def entries(framework: str, release: str) -> tuple[Entry, ...]:
    """The table of a release, each name once. Raises: SettingError."""
    file = FOLDER / f"{framework}-{release}.txt"
    by_name: dict[str, Entry] = {}
    module = owner = ""
    for number, line in _lines(file):
        if line.startswith("["):
            module, owner = line[1:-1], ""
            by_name.setdefault(module, Entry(module, "", "module"))
            continue
        names = list(NAME.finditer(line))
        if not module or NAME.sub("", line).strip():
            raise SettingError(f"{file.name}, line {number}: {line!r} is no list of names.")
        for match in names:
            entry = _entry(match, module, owner if line.startswith(" ") else "")
            by_name.setdefault(entry.full_name, entry)
            if not line.startswith(" "):
                owner = entry.name
    return tuple(by_name.values())


def _entry(match: re.Match[str], module: str, owner: str) -> Entry:
    is_class, mark, name, parameters_text, bases = match.groups()
    category = "class" if is_class else _KINDS.get(mark, "function" if parameters_text else "")
    parameters = None if parameters_text in (None, "(*)") else _parameters(parameters_text)
    above = tuple(base if "." in base else f"{module}.{base}" for base in (bases or "").split(", ") if base)
    return Entry(module, f"{owner}.{name}" if owner else name, category, parameters, above)


@functools.cache
def reasons(framework: str) -> tuple[Reason, ...]:
    """Why names of a framework are left out, or taken differently. Raises: SettingError."""
    file = FOLDER / f"{framework}-absent.txt"
    rows = []
    for number, line in _lines(file):
        pattern, separator, text = line.partition(": ")
        if not separator:
            raise SettingError(f"{file.name}, line {number}: expected 'pattern: reason'.")
        rows.append(Reason(pattern.removeprefix("~").strip(), text, pattern.startswith("~")))
    return tuple(rows)
