"""Functions that get what a guard compares, always as a tuple."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


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


def values_in_all(boxes: Any) -> tuple[Any, ...]:
    """The values of dictionaries, most of which are empty."""
    return tuple(value for box in boxes for value in box.values()) if any(boxes) else ()


def classes_of(box: Any) -> tuple[Any, ...]:
    """The classes of objects."""
    return tuple(map(type, box))


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
