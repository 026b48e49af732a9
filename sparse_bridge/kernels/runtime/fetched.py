"""Small results on their way to the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


class Fetched:
    """Small int32 vectors [n] of one device on their way to the host; later work is not waited for.

    vectors: one or more; the last has elements.
    """

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._vectors, self._event = list(vectors), None
        if not vectors[0].is_cuda:
            return
        self._sizes = [len(vector) for vector in vectors]
        self._vectors = [_on_host(vectors, self._sizes, waits=False)]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(vectors[0].device))

    @property
    def ready(self) -> bool:
        """Whether `read` will not wait; False in captures, which may not ask."""
        if self._event is None:
            return True
        return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())

    def read(self) -> list[list[int]]:
        """Their values, vector by vector. Waits for the copy."""
        if self._event is None:
            return [vector.tolist() for vector in self._vectors]
        self._event.synchronize()
        return _cut(self._vectors[0], self._sizes)

    @staticmethod
    def now(vectors: Sequence[torch.Tensor]) -> list[list[int]]:
        """The values of small int32 vectors [n] of one device, waited for: a `Fetched` that is read at
        once takes an event, which costs the host as much as three launches."""
        sizes = [len(vector) for vector in vectors]
        return _cut(_on_host(vectors, sizes, waits=True), sizes)


def _on_host(vectors: Sequence[torch.Tensor], sizes: list[int], waits: bool) -> torch.Tensor:
    """The vectors one behind another. waits: until they are there; the last one has elements."""
    gpu = vectors[0].is_cuda
    host = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=gpu)
    *parts, last = host.split_with_sizes(sizes)
    for part, vector in zip(parts, vectors[:-1], strict=True):
        part.copy_(vector, non_blocking=True)
    last.copy_(vectors[-1], non_blocking=not waits)  # behind the others in the stream
    return host


def _cut(host: torch.Tensor, sizes: list[int]) -> list[list[int]]:
    values, ends = host.tolist(), itertools.accumulate(sizes, initial=0)
    return [values[a:b] for a, b in itertools.pairwise(ends)]
