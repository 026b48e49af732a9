"""Whether what a program read is what it was: a comparison of a few hundred values by identity."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from ...hooks import IN_PLACE_OF
from ..served_forward import function_of

Getter = Callable[[Any], tuple[Any, ...]]
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)
LARGEST = 4096  # values in containers that are looked into
_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
PLAIN_TORCH = (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)


class Entry(NamedTuple):
    """What `get(box)` returned, and what the program calls each of it."""

    get: Getter
    box: Any
    values: tuple[Any, ...]
    names: tuple[str, ...]


class Known(set[str]):
    """Names that a dictionary has, where all others are absent."""


# A dictionary, names that it does not have, as they would hide others, and what the program calls it.
Absent = tuple[Any, set[str], str]


class Guards:
    """The values that a call read."""

    def __init__(
        self,
        entries: list[Entry],
        layers: list[Entry],
        absent: list[Absent],
        equal: list[Entry],
        grid_uses: frozenset[str],
    ) -> None:
        """layers: values of torch's and frameworks' own, for which `True` is as good as 1.  equal: new objects
        every time, compared by value.  grid_uses: see there."""
        self.grid_uses = grid_uses
        self._equal, self._absent = equal, [one for one in absent if one[1] or isinstance(one[1], Known)]
        self._entries, self._layers = entries, layers
        self._set()

    def _set(self) -> None:
        self._pairs = [(entry.get, entry.box) for entry in self._entries]
        self._layer_pairs = [(entry.get, entry.box) for entry in self._layers]
        self._layer_values = [entry.values for entry in self._layers]
        self._values = list(itertools.chain.from_iterable(entry.values for entry in self._entries))
        self._boxes = [box for box, _, _ in self._absent]
        self._lengths = list(map(len, self._boxes))

    def __len__(self) -> int:
        return len(self._values) + sum(map(len, self._layer_values))

    def hold(self) -> bool:
        """Whether everything is as it was. Some ten microseconds for a hundred modules."""
        try:
            values = [value for get, box in self._pairs for value in get(box)]
            same = [get(box) for get, box in self._layer_pairs] == self._layer_values
        except (KeyError, AttributeError, ValueError, TypeError):
            return False
        same = same and len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if same and list(map(len, self._boxes)) == self._lengths:
            return not self._equal or self._differing(self._equal) is None
        return self._hold_by_value()

    def _hold_by_value(self) -> bool:
        """The same, where values or containers are other objects: they are remembered if they are equal."""
        if self.changed():
            return False
        for entries in (self._entries, self._layers):
            entries[:] = [entry._replace(values=tuple(entry.get(entry.box))) for entry in entries]
        self._set()
        return True

    def changed(self) -> str:
        """What is not as it was; '' if nothing."""
        difference = self._differing(self._entries) or self._differing(self._layers) or self._differing(self._equal)
        if difference is not None:
            return difference
        for box, names, label in self._absent:
            for name in set(box) - names if isinstance(names, Known) else names:
                if name in box and not is_own(box[name]):
                    return f"{label}.{name}: {shown(box[name])}, was not there"
        return ""

    def _differing(self, entries: list[Entry]) -> str | None:
        for get, box, expected, names in entries:
            try:
                values = get(box)
            except (KeyError, AttributeError, ValueError, TypeError):
                return f"{names[0]}: no longer there"
            if len(values) != len(expected):
                return f"{names[0]}: {len(values)} entries, was {len(expected)}"
            for value, known, name in zip(values, expected, names, strict=False):
                if value is not known and not equal(value, known):
                    return f"{name}: {shown(value)}, was {shown(known)}"
        return None


def equal(value: Any, other: Any) -> bool:
    """Whether plain values are the same in all that a program can compute with."""
    if function_of(value) is function_of(other):
        return True
    if is_own(value) and is_own(other):
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, (float, complex)):
        return repr(value) == repr(other)
    if type(value) is tuple:
        return len(value) == len(other) and all(map(equal, value, other))
    if type(value) is frozenset or isinstance(value, (*PLAIN, *PLAIN_TORCH)):
        return bool(value == other)
    return False


def is_own(value: Any) -> bool:
    """Whether the package put an object there: which one is of no matter."""
    ours = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
    return ours or (isinstance(value, (FunctionType, MethodType)) and hasattr(value, IN_PLACE_OF))


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, (*PLAIN, *PLAIN_TORCH, tuple, frozenset)):
        text = repr(value)
    elif isinstance(value, (type, ModuleType)) or (callable(value) and hasattr(value, "__qualname__")):
        text = getattr(value, "__qualname__", value.__name__)
    else:
        text = f"another {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


# What gets what a guard compares, always as a tuple.


def itemgetter(keys: tuple[Any, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of a dictionary under these keys, as a tuple."""
    if len(keys) == 1:
        get, key = operator.itemgetter, keys[0]
        return get(key, key)
    return operator.itemgetter(*keys)


def doubled(keys: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` as `itemgetter` returns them."""
    return values * 2 if len(keys) == 1 else values


def values_in(box: Any) -> tuple[Any, ...]:
    """The values of a dictionary."""
    return tuple(box.values())


def items_in(box: Any) -> tuple[Any, ...]:
    """The keys of a dictionary, and its values."""
    return (*box, *box.values())


def values_in_all(boxes: Any) -> tuple[Any, ...]:
    """The values of dictionaries, most of which are empty."""
    return tuple(value for box in boxes for value in box.values()) if any(boxes) else ()


def classes_of(box: Any) -> tuple[Any, ...]:
    """The classes of objects."""
    return tuple(map(type, box))


def class_behind(box: Any) -> tuple[Any, ...]:
    """The class of what a weak reference refers to."""
    return (type(box()),)


def bases_of(box: Any) -> tuple[Any, ...]:
    """Where classes look for attributes."""
    return tuple([cls.__mro__ for cls in box])


def code_of(box: Any) -> tuple[Any, ...]:
    """The code and the defaults of functions."""
    return tuple(itertools.chain.from_iterable(map(_CODE, box)))


def class_of(box: Any) -> tuple[Any, ...]:
    """The class of an object."""
    return (box.__class__,)


def frozen(box: Any) -> tuple[Any, ...]:
    """What is in a set."""
    return (frozenset(box),)


def numbers_of(box: Any) -> tuple[Any, ...]:
    """The numbers, shape and dtype of a small array."""
    return (box.tobytes(), box.shape, str(box.dtype))


def slot(name: str) -> Callable[[Any], tuple[Any, ...]]:
    """What reads an attribute that is in no `__dict__`."""
    get = operator.attrgetter(name)
    return lambda box: (get(box),)
