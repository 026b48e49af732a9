"""How many rows there are: a number that the host knows, or one that only the device does.

A captured graph of launches repeats addresses and sizes, but inputs differ in rows. There tensors
have a capacity, kernels read from the device how many rows are in use, and nobody may ask for the
host's number, which does not exist. Everywhere else it is the number of rows of the tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...refusals import Refusal, Why


class Rows(NamedTuple):
    """host: rows in use, None where only the device knows.  device: int32 [1], one less than the
    rows in use; None where the host knows.  capacity: rows of the memory.  padding_value: what
    layers leave behind the last row of a result, and in the backward pass zeros, or NaN where it is
    NaN; None: anything, both ways.  estimate: of the rows in use where only the device knows; 0
    where there is none. Beside a padding value that is not zero it is exact: a trial's input is known.
    """

    host: int | None
    device: torch.Tensor | None
    capacity: int
    padding_value: float | None = None
    estimate: int = 0

    @staticmethod
    def of(n_rows: int) -> Rows:
        """Rows that are all in use."""
        return Rows(n_rows, None, n_rows)

    @property
    def estimate_or_capacity(self) -> int:
        """The rows in use, as far as the choice of a kernel goes."""
        return self.estimate or self.capacity

    def require_host_count(self, reader: str) -> int:
        """The rows in use. Raises Refusal, which names their `reader`, where only the device
        knows."""
        if self.host is None:
            raise Refusal(Why.GRAPH_ROWS_ON_HOST, reader)
        return self.host

    def empty(self, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Memory [capacity, columns] in the dtype of `like` (any shape) and on its device, for a layer's result;
        outside of the `scope`, in the backward pass, for a gradient. Its values are undefined, or what is to lie
        behind the last row: see `padding_value`."""
        y = like.new_empty(self.capacity, columns)
        if self.device is None or self.padding_value is None:
            return y
        return y.fill_(self.padding_value if in_scope() else 0.0 * self.padding_value)

    def look_for_nan(self, x: torch.Tensor) -> None:
        """Remember for the `scope` whether what a layer is given, x [capacity, ...], float, holds NaN in rows in use,
        where there is NaN behind them."""
        in_trial = self.device is not None and self.padding_value is not None and math.isnan(self.padding_value)
        if in_trial and in_scope() and _local.looks is not None:
            _local.looks.append(x[: self.estimate].isnan().any())

    def fill_padding(self, y: torch.Tensor) -> torch.Tensor:
        """A layer's result y [capacity, ...], float, with `padding_value` behind the last row in use, which is the
        estimate where there is such a value; written in place and returned. Kernels may have written something
        there. Not with zeros: any finite value serves then."""
        if self.padding_value and self.device is not None and in_scope():
            fill_behind(y, self.estimate, self.padding_value)
        return y


def fill_behind(y: torch.Tensor, n_rows: int, value: float) -> None:
    """Leave behind the first rows of y [N, ...], float, what shows in sums, in whatever is largest, and in whatever is
    smallest."""
    y[n_rows::2].fill_(value)
    y[n_rows + 1 :: 2].fill_(-2 * value)


_local = threading.local()
_active = 0  # scopes in all threads; a thread looks for its own only where there are any
_lock = threading.Lock()


@contextmanager
def scope(
    padded: Mapping[int, Rows],
    grids: set[int] | None = None,
    items: int | None = None,
    looks: list[torch.Tensor] | None = None,
    batch: Callable[[int], tuple[int, int]] | None = None,
) -> Iterator[None]:
    """Tensors of this thread with as many rows as a key here have these rows in use. grids: gets
    the batch sizes of the dense grids that are made.  items: batch items, where these are fixed.  looks: gets what
    `look_for_nan` finds, bool [].  batch: what `batch_of_input` returns."""
    global _active
    names = ("padded", "grids", "cache", "items", "looks", "batch")
    previous = [getattr(_local, name, None) for name in names]
    with _lock:
        _active += 1
    for name, value in zip(names, (padded, grids, {}, items, looks, batch), strict=True):
        setattr(_local, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, previous, strict=True):
            setattr(_local, name, value)
        with _lock:
            _active -= 1


def in_scope() -> bool:
    """Whether this thread has a `scope`."""
    return _active > 0 and getattr(_local, "padded", None) is not None


def scoped_cache() -> dict[Any, Any] | None:
    """For what may be used again in this thread's `scope`; None where it has none."""
    cache: dict[Any, Any] | None = _local.cache if in_scope() else None
    return cache


def fixed_items() -> int | None:
    """Batch items of any input, where this thread's `scope` fixes them."""
    items: int | None = getattr(_local, "items", None) if in_scope() else None
    return items


def batch_of_input(n_items: int = 0) -> tuple[int, int] | None:
    """(the lowest batch index, how many follow each other from there) of every input that this thread's `scope` stands
    for, each of them with rows; None where it says nothing of that. n_items: rows of a tensor that has one per item."""
    batch = getattr(_local, "batch", None) if in_scope() else None
    return None if batch is None else batch(n_items)


def register_grid(batch_size: int) -> None:
    """A dense grid of so many items was made, whose size does not depend on the rows."""
    grids = getattr(_local, "grids", None)
    if grids is not None:
        grids.add(batch_size)


def rows_of(tensor: torch.Tensor) -> Rows:
    """The rows of a tensor [N, ...] of any dtype: all N, unless the `scope` of this thread says otherwise of N."""
    return rows_of_number(tensor.shape[0])


def rows_of_number(n_rows: int) -> Rows:
    """The same of any tensor of so many rows."""
    if in_scope():
        rows: Rows | None = _local.padded.get(n_rows)
        if rows is not None:
            return rows
    return Rows.of(n_rows)
