"""Which objects a program may read: those whose state lies in attributes that can be guarded."""

from __future__ import annotations

import enum
import functools
import sys
import types
from typing import Any

import numpy as np
from torch import nn

from . import origins
from .guards import PLAIN, PLAIN_TORCH
from .origins import Origin

_HEAP_TYPE = 1 << 9  # of a class that Python code defines, as a rule
_ASKED_FOR = ("__bool__", "__len__", "__eq__", "__call__", "__getattr__", "__getattribute__")


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which says all of itself."""
    if isinstance(value, (*PLAIN, *PLAIN_TORCH, enum.Enum, np.generic, np.dtype)):
        return type(value).__flags__ & _HEAP_TYPE == 0 or isinstance(value, enum.Enum) or _is_bare(value)
    return isinstance(value, type(NotImplemented)) or type(value) is object


def _is_bare(value: Any) -> bool:
    """Whether an object of a class of its own is but a number, as those of numpy and torch."""
    return not getattr(value, "__dict__", None)


def is_trusted_cache(value: Any) -> bool:
    """Whether this is a function of torch or a framework that remembers its results, found where it says it lies."""
    name = getattr(value, "__module__", None)
    if not isinstance(value, functools._lru_cache_wrapper) or not isinstance(name, str):
        return False
    own = vars(sys.modules.get(name, types))
    return origins.of_module(name) is Origin.TRUSTED and own.get(value.__name__) is value


def is_open_book(cls: type) -> bool:
    """Whether all that objects of a class know lies in their attributes."""
    if cls is types.SimpleNamespace or cls.__module__ == "argparse":
        return True
    if origins.of_class(cls) is Origin.LIBRARY or cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    in_python = any("__slots__" in vars(base) or "__dict__" in vars(base) for base in cls.__mro__)
    return bool(cls.__flags__ & _HEAP_TYPE) and in_python


def iterates(value: Any) -> bool:
    """Whether a value hands out something else each time."""
    return hasattr(type(value), "__next__") or hasattr(type(value), "send")


def has_foreign_forward(cls: type) -> bool:
    """Whether a class of the program goes on from a layer of torch or the framework, whose functions read its
    attributes."""
    return any(
        "forward" in vars(base) and base is not nn.Module and origins.of_class(base) is Origin.TRUSTED
        for base in cls.__mro__
        if issubclass(base, nn.Module)
    )


def has_foreign_methods(cls: type) -> bool:
    """Whether functions of trusted code, as of `collections.UserDict` and `numpy.poly1d`, read the attributes of a
    class's objects."""
    return any(
        isinstance(member, types.FunctionType)
        for base in cls.__mro__
        if origins.of_class(base) is Origin.TRUSTED and base.__module__ not in ("typing", "abc")
        for member in vars(base).values()
    )


def operators_of(cls: type) -> set[str]:
    """The methods that Python calls unnamed and that a class has of the program, or that change what it does without;
    `forward` among them."""
    names = {name for base in cls.__mro__ if origins.of_class(base) is Origin.PROGRAM for name in vars(base)}
    special = {name for name in names if name.startswith("__") and callable(getattr(cls, name, None))}
    return {*special, *_ASKED_FOR, "forward"} if issubclass(cls, nn.Module) else {*special, *_ASKED_FOR}
