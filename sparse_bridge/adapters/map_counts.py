"""How often maps were prefetched, and which dataflows were tuned for layers that share one, for
reports; and which dataflows modules were given."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class MapCount:
    """Inputs whose maps were queued together (prefetched); those whose maps were queued a second
    time, because their bounds left what was expected (requeued); and those whose maps were dropped
    and built one by one, because rows were equal, outlying or too many (dropped)."""

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


def given_dataflows() -> dict[str, dict[str, int]]:
    """See `Report.dataflows`; imports nothing."""
    override = sys.modules.get("sparse_bridge.core.conv.override")
    return {} if override is None else override.listed()


def tuned_groups() -> tuple[str, ...]:
    """Dataflows in force that were chosen by timing for layers that share a kernel map: of which
    map and products, and the times that decided; imports nothing."""
    choice = sys.modules.get("sparse_bridge.core.tuning.group_choice")
    if choice is None:
        return ()
    return tuple(f"tuned {one}" for _, one in sorted(choice.used_groups().items()))
