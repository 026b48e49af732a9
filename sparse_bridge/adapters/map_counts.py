"""How often maps were prefetched, for reports."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class MapCount:
    """Inputs whose maps were queued or replayed together (prefetched); those whose maps were queued
    a second time, because their bounds left what was expected (requeued); and those whose maps were
    dropped and built one by one, because rows were equal, outlying or too many (dropped)."""

    prefetched: int = 0
    requeued: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        text = f"maps of {self.prefetched} inputs prefetched"
        if self.requeued:
            text += f"; of {self.requeued} queued again, as bounds had grown"
        if self.dropped:
            text += f"; of {self.dropped} dropped and built one by one"
        return text


def prefetched() -> MapCount:
    """Since the process began, or what was learnt was forgotten; imports nothing."""
    prefetch = sys.modules.get("sparse_bridge.core.capture.prefetch")
    return MapCount() if prefetch is None else MapCount(**prefetch.counts())


def lines(count: MapCount) -> list[str]:
    """What a report says of it: nothing where nothing was prefetched."""
    return [str(count)] if count != MapCount() else []
