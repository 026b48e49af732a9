"""Small results on their way to the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


class Fetched:
    """Small int32 vectors of one device on their way to the host; later work is not waited for."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._vectors, self._event = list(vectors), None
        if not vectors[0].is_cuda:
            return
        self._ends = list(itertools.accumulate(len(vector) for vector in vectors))
        host = _pinned(self._ends[-1])
        sizes = [len(vector) for vector in vectors]
        for part, vector in zip(host.split_with_sizes(sizes), vectors, strict=True):
            part.copy_(vector, non_blocking=True)
        self._vectors = [host]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(vectors[0].device))

    @property
    def ready(self) -> bool:
        """Whether `read` will not wait; False in captures, which may not ask."""
        if self._event is None:
            return True
        return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())

    def read(self) -> list[list[int]]:
        """Their values."""
        if self._event is None:
            return [vector.tolist() for vector in self._vectors]
        self._event.synchronize()
        values = self._vectors[0].tolist()
        return [values[a:b] for a, b in itertools.pairwise((0, *self._ends))]

    @staticmethod
    def now(vectors: Sequence[torch.Tensor]) -> list[list[int]]:
        """The values of small int32 vectors of one device, waited for: a `Fetched` that is read at
        once takes an event, which costs the host as much as three launches."""
        sizes = [len(vector) for vector in vectors]
        host = (
            _pinned(sum(sizes))
            if vectors[0].is_cuda
            else torch.empty(sum(sizes), dtype=torch.int32)
        )
        parts = host.split_with_sizes(sizes)
        for part, vector in zip(parts[:-1], vectors[:-1], strict=True):
            part.copy_(vector, non_blocking=True)
        parts[-1].copy_(vectors[-1])  # behind the others in the stream, and waits
        values, ends = host.tolist(), itertools.accumulate(sizes, initial=0)
        return [values[a:b] for a, b in itertools.pairwise(ends)]


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
