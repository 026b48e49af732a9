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
def _plain_class(cls: Any) -> bool:
    if type(cls) not in (type, abc.ABCMeta) or issubclass(cls, nn.Module):
        return False
    for base in cls.__mro__[:-1]:
        slots = vars(base).get("__slots__", ())
        if not base.__flags__ & _HEAP_TYPE or not set(slots) <= _SLOTS:
            return False
    return cls.__dictoffset__ != 0 and all(getattr(cls, name, None) is getattr(object, name, None) for name in _OWN)


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is nothing else; None for other objects."""
    cls: Any = type(value)
    return vars(value) if _plain_class(cls) else None


def wraps(value: Any, is_tensor: IsTensor) -> bool:
    """Whether an object holds exactly one sparse tensor in its attributes, or in those of objects
    in there, and can be taken apart."""
    if is_tensor(value) or attributes(value) is None:
        return False
    return len({id(tensor) for tensor in sparse_in(value, is_tensor)}) == 1


def sparse_in(value: Any, is_tensor: IsTensor, depth: int = _DEEPEST) -> Iterator[Any]:
    """The sparse tensors in attributes."""
    if is_tensor(value):
        yield value
        return
    own_attributes = attributes(value) if depth else None
    for attribute in () if own_attributes is None else own_attributes.values():
        yield from sparse_in(attribute, is_tensor, depth - 1)


def anew(like: Any, values: dict[str, Any]) -> Any:
    """An object of the class of another, with these attributes."""
    result = object.__new__(type(like))
    vars(result).update(values)
    return result
