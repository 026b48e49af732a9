"""Names of functions and classes, and of what is in them."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator

from sparse_bridge.tools.api_coverage.objects import last_name, stored, targets

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNKNOWN = "(*)"
MARKS = {"class": "class ", "property": "@", "attribute": "."}
PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter"}


@dataclasses.dataclass
class Name:
    """kind: "class", "function", "property", "attribute", or "" (a constant, or from elsewhere)."""

    name: str
    kind: str = ""
    parameters: str = ""
    bases: list[str] = dataclasses.field(default_factory=list)
    members: dict[str, Name] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        bases = f" < {', '.join(self.bases)}" if self.bases else ""
        return MARKS.get(self.kind, "") + self.name + self.parameters + bases


def public(name: str) -> bool:
    """No leading underscore, or an operator that not every object has."""
    if name.startswith("__"):
        return name.endswith("__") and name not in {*vars(object), "__slots__"}
    return not name.startswith("_")


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, conditional ones too; not what runs as a script or never."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__ ==" in ast.unparse(statement.test):
            continue
        if isinstance(statement, ast.If) and last_name(statement.test) == "TYPE_CHECKING":
            continue
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For, ast.ExceptHandler)):
            for block in ("body", "orelse", "handlers", "finalbody"):
                yield from statements(getattr(statement, block, ()))


def decorators(function: ast.stmt) -> set[str]:
    return {last_name(d) for d in function.decorator_list}  # type: ignore[attr-defined]


def parameters(function: ast.stmt, bound: bool) -> str:
    """As `(a, b=1, *, c=...)`, without annotations; bound: without the first."""
    if "overload" in decorators(function):
        return UNKNOWN
    given: ast.arguments = function.args  # type: ignore[attr-defined]
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    found = [a.arg + _default(d) for a, d in zip(plain, defaults, strict=True)][bound:]
    if given.vararg or given.kwonlyargs:
        found.append(f"*{given.vararg.arg}" if given.vararg else "*")
    found += [a.arg + _default(d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(found)})"


def _default(default: ast.expr | None) -> str:
    if default is None:
        return ""
    try:
        return f"={ast.literal_eval(default)!r}"
    except ValueError:
        named = isinstance(default, (ast.Name, ast.Attribute))
        return f"={ast.unparse(default)}" if named else "=..."


def members(definition: ast.ClassDef) -> dict[str, Name]:
    """Those that a class defines itself."""
    found: dict[str, Name] = {}
    for part in statements(definition.body):
        if isinstance(part, FUNCTIONS):
            if decorators(part) & PROPERTIES:
                found[part.name] = Name(part.name, "property")
            else:
                taken = parameters(part, "staticmethod" not in decorators(part))
                found[part.name] = Name(part.name, "function", taken)
        elif isinstance(part, ast.ClassDef):
            found[part.name] = Name(part.name, "class", UNKNOWN)
        for target in targets(part):
            value = part.value  # type: ignore[attr-defined]
            other = found.get(last_name(value)) if isinstance(value, ast.Name) else None
            if isinstance(target, ast.Name) and other and other.kind == "function":
                found[target.id] = Name(target.id, "function", other.parameters)
            elif isinstance(target, ast.Name):  # an annotation alone makes no member
                found.setdefault(target.id, Name(target.id, "" if value else "attribute"))
    for name in stored(definition):
        found.setdefault(name, Name(name, "attribute"))
    return {n: m for n, m in found.items() if m.kind == "function" or not n.startswith("__")}
