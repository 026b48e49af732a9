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
        host = torch.empty(self._ends[-1], dtype=torch.int32, device="cpu", pin_memory=True)
        self._vectors, start = [host], 0
        for vector, end in zip(vectors, self._ends, strict=True):
            host[start:end].copy_(vector, non_blocking=True)
            start = end
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
