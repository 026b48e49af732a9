"""Parts of a rulebook beside its views: the objects derived from them, and an observer."""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    """Hears which views of a rulebook are requested."""

    def on_view(self, side: int, tiles: bool) -> None:
        """A view of `side` was requested; tiles: as mask-ordered tiles."""

    def on_pairs(self) -> None:
        """Pair lists were requested, on the device."""


class Derived:
    """What upper layers derived from a rulebook (plans, chunks), which lives as long as it does.

    get: the object under a key, or None.
    """

    __slots__ = ("_entries", "get")

    def __init__(self) -> None:
        self._entries: dict[Any, Any] = {}
        self.get = self._entries.get  # the dictionary's own: it is asked in every layer call

    def put(self, key: Any, value: Any) -> Any:
        """Keep an object under a key, and return it."""
        self._entries[key] = value
        return value

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[Any]:
        """All objects at this moment."""
        return list(self._entries.values())

    def drop(self) -> None:
        """Forget all of it: it is derived again when it is asked for."""
        self._entries.clear()


def map_bytes(n_rows: int, new: int, n_offsets: int) -> int:
    """Bytes that building a map on a device takes, at most: a table with masks, and a hash table a
    sixth full; of `new` rows that come with it the same, and a slot for whatever reaches them."""
    per_row = 4 * (n_offsets - (-n_offsets // 32)) + 6 * 12
    return (n_rows + new) * per_row + (4 * n_offsets * n_rows if new else 0)
