"""The modules of a package, and what each of them brings in from the others."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

from sparse_bridge.tools.api_coverage.objects import last_name, targets

from .members import FUNCTIONS, UNKNOWN, Name, members, parameters, public, statements

# Bases that leave `Name()` as it is, and those that make no object by a call.
PLAIN_BASES = {"object", "ABC", "Module", "Protocol", "Generic", "Function"}
ENUMS = {"Enum", "IntEnum", "Flag", "IntFlag"}
# Of functions of autograd: what autograd itself calls.
AUTOGRAD = ("forward", "backward", "setup_context", "symbolic", "vmap", "jvp")


class Release:
    """companion: a compiled package that belongs to it.
    imports: list what every module brings in from the others, not only what packages do."""

    def __init__(self, folder: Path, companion: str = "", imports: bool = False) -> None:
        self.companion = companion
        self.imports = imports
        self.trees: dict[str, ast.Module] = {}
        self.packages: set[str] = set()
        self.stubs: set[str] = set()  # of compiled modules
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):
            parts = list(file.relative_to(folder.parent).with_suffix("").parts)
            if parts[-1] == "__init__":
                del parts[-1]
                self.packages.add(".".join(parts))
            name = ".".join(parts)
            if file.suffix == ".pyi":
                self.stubs.add(name)
            self.trees[name] = ast.parse(file.read_text(encoding="utf-8"))
        self.definitions = {name: self._definitions(tree) for name, tree in self.trees.items()}

    def modules(self, only: list[str], skipped: list[str]) -> dict[str, dict[str, Name]]:
        """Names by public module. only, skipped: patterns of modules."""
        found = {}
        for module in self.trees:
            wanted = not only or any(fnmatch.fnmatchcase(module, pattern) for pattern in only)
            wanted = wanted and not any(fnmatch.fnmatchcase(module, s) for s in skipped)
            hidden = any(p.startswith("_") and p != "__version__" for p in module.split("."))
            if wanted and not hidden:
                found[module] = self.names(module)
        return found

    @staticmethod
    def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
        found: dict[str, ast.stmt] = {}
        for part in statements(tree.body):
            if isinstance(part, (*FUNCTIONS, ast.ClassDef)):
                found[part.name] = part
            for target in targets(part):
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, part)
        return found

    def names(self, module: str) -> dict[str, Name]:
        """Public names of a module."""
        found = {name: self._described(module, name) for name in self.definitions[module]}
        brought = self._imported(module)
        for name in brought if module in self.packages else self._listed(module):
            found.setdefault(name, self._brought(name, *brought.get(name, ("", ""))))
        if self.imports and module not in self.stubs:
            found.update((name, Name(name)) for name in brought if name not in found)
        return {n: d for n, d in found.items() if n == "__version__" or not n.startswith("_")}

    def _brought(self, name: str, module: str, there: str) -> Name:
        """From elsewhere; from a stub with its members, as nobody looks for them at the stub."""
        if module in self.stubs and there in self.definitions[module]:
            return dataclasses.replace(self._described(module, there), name=name, bases=[])
        return Name(name)

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        """The module of this release that a statement imports from, "" for another."""
        package = module if module in self.packages else module.rpartition(".")[0]
        if statement.level > 1:
            package = ".".join(package.split(".")[: 1 - statement.level])
        below = f"{package}.{statement.module}" if statement.module else package
        # Without a dot it may still lie beside the module, where upstream extends the path.
        choices = [below] if statement.level else [statement.module or "", below]
        return next((name for name in choices if name in self.trees), "")

    def _imported(self, module: str) -> dict[str, tuple[str, str]]:
        """Local name -> (module of this release or its companion, name there or "")."""
        found: dict[str, tuple[str, str]] = {}
        for part in statements(self.trees[module].body):
            if isinstance(part, ast.Import):
                for alias in part.names:
                    if alias.asname and alias.name in self.trees:
                        found[alias.asname] = (alias.name, "")
            if not isinstance(part, ast.ImportFrom):
                continue
            source = self._source(module, part)
            if not source and self.companion and (part.module or "").startswith(self.companion):
                source = str(part.module)
            for alias in part.names if source else ():
                if alias.name == "*":
                    found.update((name, (source, name)) for name in self._starred(source))
                elif f"{source}.{alias.name}" in self.trees and not self._defines(source, alias):
                    found[alias.asname or alias.name] = (f"{source}.{alias.name}", "")
                else:
                    found[alias.asname or alias.name] = (source, alias.name)
        return found

    def _defines(self, module: str, alias: ast.alias) -> bool:
        return alias.name in self.definitions[module]

    def _listed(self, module: str) -> list[str]:
        """Its `__all__`, as far as it is written out."""
        found: list[str] = []
        for part in statements(self.trees[module].body):
            if any(last_name(target) == "__all__" for target in targets(part)):
                with contextlib.suppress(ValueError):
                    found += ast.literal_eval(part.value)  # type: ignore[attr-defined]
        return found

    def _starred(self, module: str) -> list[str]:
        if module not in self.trees:
            return []
        return self._listed(module) or [name for name in self.names(module) if public(name)]

    def _described(self, module: str, name: str) -> Name:
        part = self.definitions[module][name]
        if isinstance(part, FUNCTIONS):
            return Name(name, "function", parameters(part, False))
        if not isinstance(part, ast.ClassDef):
            return Name(name)
        roots = self._roots(module, part)
        found = {n: member for n, member in self._members(module, part).items() if public(n)}
        if "Function" in roots:
            forward = found.get("forward")
            found = {n: member for n, member in found.items() if n not in AUTOGRAD}
            if forward:
                taken = re.sub(r"^\(ctx(, )?", "(", forward.parameters)
                found["apply"] = Name("apply", "function", taken)
        bases = [
            base.name if where == module else f"{where}.{base.name}"
            for where, base in self._bases(module, part)
            if public(base.name)
        ]
        return Name(name, "class", self._made_by(module, part, roots), bases, found)

    def _members(self, module: str, definition: ast.ClassDef) -> dict[str, Name]:
        """Its own, and those of bases that are not public."""
        found: dict[str, Name] = {}
        for where, base in self._bases(module, definition):
            if not public(base.name):
                found.update(self._members(where, base))
        return {**found, **members(definition)}

    def _bases(self, module: str, definition: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Bases of a class that are in this release."""
        for base in definition.bases:
            where, name = module, last_name(base)
            while where in self.trees and name not in self.definitions[where]:
                where, name = self._imported(where).get(name, ("", ""))
            found = self.definitions[where].get(name) if where in self.trees else None
            if isinstance(found, ast.ClassDef) and found is not definition:
                yield where, found

    def _roots(self, module: str, definition: ast.ClassDef) -> set[str]:
        """Names of the bases from elsewhere."""
        own = list(self._bases(module, definition))
        found = {last_name(base) for base in definition.bases} - {base.name for _, base in own}
        return found.union(*(self._roots(*base) for base in own))

    def _made_by(self, module: str, definition: ast.ClassDef, roots: set[str]) -> str:
        """The parameters of a class."""
        if roots & ENUMS:
            return ""
        for part in statements(definition.body):
            if isinstance(part, FUNCTIONS) and part.name == "__init__":
                return parameters(part, True)
        for base in self._bases(module, definition):
            if (found := self._made_by(*base, self._roots(*base))) not in ("()", ""):
                return found
        return "()" if roots <= PLAIN_BASES and not definition.decorator_list else UNKNOWN
