"""Objects of a program's own classes around a sparse tensor: which can be taken apart.

All that such an object knows must lie in its attributes, so that another one with the same
attributes is the same but for its identity.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_DEEPEST = 3  # objects inside of objects
_HEAP_TYPE = 1 << 9  # of a class that Python code defines
_OWN = ("__new__", "__getattribute__", "__setattr__", "__delattr__", "__del__", "__reduce_ex__")
_SLOTS = frozenset({"__dict__", "__weakref__"})

IsTensor = Callable[[Any], bool]


@functools.lru_cache(maxsize=1024)
def _plain_class(kind: Any) -> bool:
    if type(kind) not in (type, abc.ABCMeta) or issubclass(kind, nn.Module):
        return False
    for one in kind.__mro__[:-1]:
        slots = vars(one).get("__slots__", ())
        if not one.__flags__ & _HEAP_TYPE or not set(slots) <= _SLOTS:
            return False
    return kind.__dictoffset__ != 0 and all(getattr(kind, name, None) is getattr(object, name, None) for name in _OWN)


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is nothing else; None for other objects."""
    kind: Any = type(value)
    return vars(value) if _plain_class(kind) else None


def wraps(value: Any, is_tensor: IsTensor) -> bool:
    """Whether an object holds exactly one sparse tensor in its attributes, or in those of objects
    in there, and can be taken apart."""
    if is_tensor(value) or attributes(value) is None:
        return False
    return len({id(one) for one in sparse_in(value, is_tensor)}) == 1


def sparse_in(value: Any, is_tensor: IsTensor, depth: int = _DEEPEST) -> Iterator[Any]:
    """The sparse tensors in attributes."""
    if is_tensor(value):
        yield value
        return
    held = attributes(value) if depth else None
    for one in () if held is None else held.values():
        yield from sparse_in(one, is_tensor, depth - 1)


def anew(like: Any, held: dict[str, Any]) -> Any:
    """An object of the class of another, with these attributes."""
    made = object.__new__(type(like))
    vars(made).update(held)
    return made
