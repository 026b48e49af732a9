"""Numbers that launches read from the device, sent without waiting, in captures as well."""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Iterator, Sequence

import torch

from ...refusals import Refusal, Why
from . import target as targets

_Writes = list[tuple[torch.Tensor, Sequence[int]]]


class _Later(threading.local):
    """Numbers that launches of a capture read: where they are to be, and which. refused: there are to be none."""

    def __init__(self) -> None:
        self.refused = False
        self.room: torch.Tensor | None = None
        self.writes = _Writes()

    def reserve(self, values: Sequence[int]) -> torch.Tensor:
        assert self.room is not None
        start = sum(len(view) for view, _ in self.writes)
        if (end := start + len(values)) > len(self.room):
            raise RuntimeError(f"a capture reads {end} numbers or more; {len(self.room)} fit.")
        self.writes.append((self.room[start:end], values))
        return self.writes[-1][0]


_later = _Later()


@contextlib.contextmanager
def uploads_later(room: torch.Tensor | None) -> Iterator[_Writes]:
    """Let captured launches read what `uploaded` is to send, from `room`, int64 [n]; None: captures send nothing.

    `uploaded` raises RuntimeError where `room` is too small.

    What is yielded has to be written before a replay, and `room` lives as long as the graph. It
    must not be of the capture's pool, whose memory other graphs write to.
    """
    _later.room, _later.writes = room, []
    try:
        yield _later.writes
    finally:
        _later.room, _later.writes = None, []


@contextlib.contextmanager
def uploads_refused() -> Iterator[None]:
    """In this block `check_uploads` raises Refusal, as a graph of what is launched here could not repeat them."""
    before, _later.refused = _later.refused, True
    try:
        yield
    finally:
        _later.refused = before


def check_uploads() -> None:
    """Raise Refusal where `uploads_refused`, whether or not the numbers have been sent already: who has them may let
    them go."""
    if _later.refused:
        raise Refusal(Why.GRAPH_NOT_PREFETCHED)


def uploaded(values: Sequence[int], device: torch.device, reaches: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """The values as int64 [n] on `device`, without waiting for it.

    reaches: whose addresses are among the values. They live as long as the result, which tells
    whoever checks a kernel's accesses what it may reach. Raises RuntimeError in a capture that sends more than its
    room, see `uploads_later`, holds, and Refusal in one without, as `check_uploads` does.
    """
    check_uploads()
    captures = targets.capturing(device)
    if captures and _later.room is not None:
        return _later.reserve(values)
    if captures:  # the copy would read memory that is somebody else's by then
        raise Refusal(Why.GRAPH_NOT_PREFETCHED)
    if targets.device_index(device) < 0:
        sent = torch.tensor(values, dtype=torch.int64, device=device)
    else:
        host = torch.frombuffer(array("q", values), dtype=torch.int64)
        if not targets.copies_aside():
            host = host.pin_memory()
        sent = host.to(device, non_blocking=True)
    if reaches:
        sent.reaches = tuple(reaches)  # type: ignore[attr-defined]
    return sent
