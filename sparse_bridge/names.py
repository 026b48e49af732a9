"""Names: modules that are imported when they are first named, and what was meant by a name that does not exist."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType

_frameworks: set[str] = set()  # import names of the frameworks whose layers are served


def add_frameworks(packages: Iterable[str]) -> None:
    """The layers of these packages are served."""
    _frameworks.update(packages)


def is_framework(package: str) -> bool:
    """Whether a package's layers are served."""
    return package in _frameworks


def modules_of(package: str, *names: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package that imports these of its modules where they are first asked for."""

    def attribute(name: str) -> ModuleType:
        if name not in names:
            raise MissingNameError(package, name, lambda: names)
        return importlib.import_module(f".{name}", package)

    return attribute


def meant(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The sentence "Did you mean: 'X'?" after a space, where one of `names` is spelt like `name`; else nothing. Names
    with an underscore in front are what programs look for without meaning any of ours.  prefix: of all of them."""
    import difflib

    if name.startswith("_"):
        return ""
    by_lower = {one.lower(): one for one in names if not one.startswith("_")}
    longer = [one for one in by_lower if one.startswith(name.lower())]
    near = difflib.get_close_matches(name.lower(), longer or by_lower, 1, 0.7)
    return f" Did you mean: {prefix + by_lower[near[0]]!r}?" if near else ""


class MissingNameError(AttributeError):
    """A module has no such attribute. What was meant is looked for when the text is read: `hasattr` never reads it."""

    def __init__(self, module: str, name: str, names: Callable[[], Iterable[str]]) -> None:
        # Without `obj` the interpreter adds no suggestion of its own to the text.
        super().__init__(f"module {module!r} has no attribute {name!r}", name=name)
        self._names = names

    def __str__(self) -> str:
        hint = meant(str(self.name), self._names())
        return f"{self.args[0]}.{hint}" if hint else str(self.args[0])

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        return AttributeError, (str(self),)
