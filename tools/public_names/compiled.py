"""Names of compiled modules: what Python files use of them, and what bindings in C++ give them."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from .members import UNKNOWN, Name, public

Modules = dict[str, dict[str, Name]]
# Calls that bind; the first literal behind one is the name.
_CALL = re.compile(r"\bm\.def|py::class_|py::enum_|\.def\w*|\.value|\.export_values")
_LITERAL = re.compile(r'^[^";]*?"(\w+)"(\) \+)?')
_STRING = re.compile(r'std::string[^";]*"(\w+)"')


def used(trees: Iterable[ast.Module], outside: str) -> Modules:
    """Names of a package from elsewhere that files import or look up."""
    found: Modules = {}
    for tree in trees:
        # What is brought in: local name -> (module, name there or "").
        local: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _within(node.module or "", outside):
                for alias in node.names:
                    local[alias.asname or alias.name] = (str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname and _within(alias.name, outside):
                        local[alias.asname] = (alias.name, "")
        for module, name in local.values():
            found.setdefault(module, {}).update({name: Name(name)} if name else {})
        for node in ast.walk(tree):
            path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            first, _, rest = path.partition(".")
            if first in local and re.fullmatch(r"[\w.]+", rest):
                module, name = local[first]
                name = f"{name}.{rest}" if name else rest
                found[module][name] = Name(name)
    return found


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def bound(files: list[Path], module: str) -> Modules:
    """Names that bindings by pybind11 give to a compiled module."""
    found: dict[str, Name] = {}
    for file in files:
        text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        owner: Name | None = None
        calls = list(_CALL.finditer(text))
        ends = [call.start() for call in calls[1:]] + [len(text)]
        for call, end in zip(calls, ends):  # noqa: B905 - there may be none
            literal = _LITERAL.search(text[call.end() : end])
            what, name = call[0], literal[1] if literal else ""
            if what.startswith("py::"):  # its name may stand in a string before
                name = name or _STRING.findall(text[: call.start()])[-1]
                name += "*" if literal and literal[2] else ""  # a template: its type follows
                owner = found.setdefault(name, Name(name, "class", UNKNOWN))
            elif what == ".export_values" and owner is not None:
                found.update((member, Name(member)) for member in owner.members)
            elif name and (what == "m.def" or owner is None):
                found.setdefault(name, Name(name, "function", UNKNOWN))
            elif name and owner is not None and public(name):
                kind, taken = ("function", UNKNOWN) if what == ".def" else ("", "")
                owner.members[name] = Name(name, kind, taken)
    return {module: found}


def merged(bindings: Modules, uses: Modules) -> Modules:
    """What is bound, and what else is used; uses tell the names of templates."""
    found = {module: dict(names) for module, names in bindings.items()}
    for module, names in uses.items():
        here = found.setdefault(module, {})
        templates = [name for name in here if name.endswith("*")]
        for name, what in names.items():
            owner, _, member = name.rpartition(".")
            known = owner in here and here[owner].kind == "class"
            if known:
                here[owner].members.setdefault(member, Name(member))
            for template in templates:
                if name.startswith(template[:-1]):
                    what = dataclasses.replace(here[template], name=name)
            if not known:
                here.setdefault(name, what)
    for names in found.values():
        for name in [name for name in names if name.endswith("*")]:
            del names[name]
    return found
