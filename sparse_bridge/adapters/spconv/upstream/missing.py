"""Parts of spconv's and cumm's compiled code that have no counterpart here: they refuse by name."""

from __future__ import annotations

from typing import Any

from ....errors import UnsupportedError

_INSTEAD = "use the Python API of spconv.pytorch instead"


class MissingExtensionError(UnsupportedError, AttributeError):
    """A part of spconv's compiled code was asked for.

    An AttributeError too, so that `hasattr` and searches through all modules get their answer.
    """

    @classmethod
    def of(cls, owner: str, name: str, instead: str = _INSTEAD) -> Exception:
        """The error for `owner.name`. instead: what to do."""
        if name.startswith("__"):  # the import system and inspection ask for many of these
            return AttributeError(f"{owner!r} has no attribute {name!r}")
        return cls(f"{owner}.{name} is part of spconv's compiled code, which is not used here; {instead}.")


class MissingParts(type):
    """Classes whose other attributes refuse, and name themselves."""

    _home: str
    _instead: str = _INSTEAD

    def __getattr__(cls, name: str) -> Any:
        home = cls.__dict__.get("_home", cls.__module__)
        raise MissingExtensionError.of(f"{home}.{cls.__name__}", name, getattr(cls, "_instead", _INSTEAD))


def missing_class(module: str, name: str, instead: str = _INSTEAD) -> type:
    """A class that can be imported and named, but neither called nor looked into."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise MissingExtensionError.of(module, name, instead)

    body = {"__module__": module, "__init__": refuse, "_instead": instead, "__doc__": f"Not here: {instead}."}
    return MissingParts(name, (), body)


def tuner_class(module: str, name: str) -> type:
    """A class of tuners: objects can be made and handed on; asking them to tune refuses."""

    def attribute(self: Any, method: str) -> Any:
        raise MissingExtensionError.of(f"{module}.{name}", method)

    def init(self: Any, desps: Any = ()) -> None:
        """desps: kernels to choose from, which are not looked at."""

    body = {
        "__module__": module,
        "__init__": init,
        "__getattr__": attribute,
        "__doc__": "sparse_bridge chooses tiles by itself.",
    }
    return type(name, (), body)
