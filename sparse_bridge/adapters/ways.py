"""What a report says of the ways that calls took besides a plan in Python, see docs/which_way.md:
prefetched maps, dataflows that were tuned or given to modules, graphs, the helper in C.

Nothing is imported for it, and no call counts anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .. import native


@dataclasses.dataclass(frozen=True)
class MapCount:
    """Inputs whose maps were queued together (prefetched); those of them that were queued a
    second time, because their bounds left what was expected (requeued); and those whose maps were
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
    """Since the process began, or what was learnt was forgotten."""
    prefetch = _loaded("core.prefetch.prefetch")
    return MapCount() if prefetch is None else MapCount(**prefetch.counts())


def map_lines(count: MapCount) -> list[str]:
    """What a report says of it: nothing where nothing was prefetched."""
    return [str(count)] if count != MapCount() else []


def given_dataflows() -> dict[str, dict[str, int]]:
    """See `Report.dataflows`."""
    override = _loaded("core.conv.override")
    return {} if override is None else override.listed()


def tuned_groups() -> tuple[str, ...]:
    """Dataflows in force that were chosen by timing for layers that share a kernel map: of which
    map and products, and the times that decided."""
    choice = _loaded("core.conv.choice")
    if choice is None:
        return ()
    return tuple(f"tuned {group}" for _, group in sorted(choice.used_groups().items()))


def open_ways() -> tuple[str, ...]:
    """See `Report.ways`: a line each, for those that are open in this process."""
    return tuple(itertools.chain(_followed(), _helped(), _in_torch()))


def replayed() -> list[tuple[str, int, int, str | None]]:
    """Models, or parts of them, that graphs replay: class, calls, graphs, why there are no more."""
    regions = _loaded("core.capture.graph_regions")
    return [] if regions is None else regions.summary()


def _loaded(name: str) -> Any:
    return sys.modules.get(f"sparse_bridge.{name}")


def _followed() -> Iterator[str]:
    history = _loaded("core.conv.history")
    entries = [] if history is None else list(history.histories.values())
    plans = sum(record.plan is not None or record.full_plan is not None for _, record in entries)
    if plans:
        yield f"layers that are launched together with what follows them: {plans}"


def _in_torch() -> Iterable[str]:
    registry = _loaded("core.conv.registry")
    return () if registry is None else registry.in_torch()


def _helped() -> Iterator[str]:
    calls = _loaded("native.calls")
    if calls is not None and calls.helper is not None and native.reason() is None:
        yield "the helper in C repeats calls of known layers"
