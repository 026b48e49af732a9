"""Statistics of layer calls: which ran here and which ran in the original framework, and why.

Adapters call `note` once per layer call; everything else reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from .. import settings, state
from ..errors import UnsupportedError
from ..tables import Column, Table
from .base import FrameworkStatus
from .enabling.model_layers import ModuleReport, module_table
from .ways import MapCount, given_dataflows, map_lines, open_ways, prefetched, replayed, tuned_groups

Call = tuple[str, str, str | None]
Tally = dict[Call, int]

_tally: Tally = {}
_strict: dict[str, bool | None] = {}
_listeners: list[tuple[int, list[Call]]] = []
_lock = threading.Lock()


def _renew_lock() -> None:
    """A fork may happen while another thread counts; the child has no such thread to release."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@dataclasses.dataclass(frozen=True)
class LayerCount:
    """Calls of one layer type: how many were bridged, how many ran original, by reason."""

    bridged: int
    original: dict[str, int]


def note(framework: str, layer: str, reason: str | None = None) -> None:
    """Count one call of `layer`: bridged, or left to the original framework for `reason`.

    Call it with a reason before the original runs.

    Raises:
        UnsupportedError: there is a reason, and strict mode is on for `framework`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return  # a call is no call of the layer then
    if reason is not None and is_strict(framework):
        raise UnsupportedError(
            f"{framework} {layer} cannot be bridged: {reason}. Strict mode does not run the "
            "original instead; change the layer, or leave strict mode (enable(strict=False), "
            "SPARSE_BRIDGE_ENABLE=strict=0)."
        )
    key = (framework, layer, reason)
    with _lock:
        _tally[key] = _tally.get(key, 0) + 1
    for thread, calls in _listeners:
        if thread == threading.get_ident():
            calls.append(key)


@contextlib.contextmanager
def listen() -> Iterator[list[Call]]:
    """Collect the calls that the current thread notes, as (framework, layer, reason)."""
    calls: list[Call] = []
    mine = threading.get_ident(), calls
    _listeners.append(mine)
    try:
        yield calls
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not mine]


def is_strict(framework: str) -> bool:
    """Whether an unbridged call raises: the choice made in `enable()`, otherwise the setting."""
    chosen = _strict.get(framework)
    return settings.get().strict if chosen is None else chosen


def chosen_strict(framework: str) -> bool | None:
    """The choice made in `enable()`; None: it is left to the setting."""
    return _strict.get(framework)


def set_strict(framework: str, strict: bool | None) -> None:
    """Choose strict mode for one framework; None leaves it to the setting."""
    _strict[framework] = strict


@state.owns
def reset() -> None:
    """Forget all counts."""
    with _lock:
        _tally.clear()


def count_in(tally: Tally) -> None:
    """Count on in `tally`, which begins with what is counted."""
    global _tally
    with _lock:
        _tally = tally


def snapshot() -> Tally:
    """A copy of the raw counts, to tell later what was added."""
    with _lock:
        return dict(_tally)


def since(earlier: Tally, now: Tally | None = None) -> Tally:
    """What was counted between two snapshots (the second one defaults to now)."""
    now = snapshot() if now is None else now
    # after a reset() in between, everything that is there counts as new
    added = {key: n - earlier.get(key, 0) if n >= earlier.get(key, 0) else n for key, n in now.items()}
    return {key: n for key, n in added.items() if n}


def counts(tally: Tally | None = None) -> dict[str, dict[str, LayerCount]]:
    """Counts by framework, then layer type; of the whole process, or of `tally`."""
    grouped: dict[str, dict[str, LayerCount]] = {}
    for (framework, layer, reason), n in (snapshot() if tally is None else tally).items():
        layers = grouped.setdefault(framework, {})
        count = layers.get(layer, LayerCount(0, {}))
        if reason is None:
            layers[layer] = LayerCount(count.bridged + n, count.original)
        else:
            layers[layer] = LayerCount(count.bridged, {**count.original, reason: n})
    return grouped


@dataclasses.dataclass(frozen=True)
class ReplayCount:
    """A model that is replayed, or a part of one that was chosen as it ran: its
    class, calls that were replayed, graphs that are held, and why none is captured any more, or was
    not."""

    name: str
    calls: int
    graphs: int
    reason: str | None

    def __str__(self) -> str:
        text = f"{self.name}: {self.calls} calls replayed from {self.graphs} graphs"
        return text if self.reason is None else f"{text}; {self.reason}"


def replays() -> tuple[ReplayCount, ...]:
    """Parts of models that are replayed, or were tried."""
    return tuple(ReplayCount(*entry) for entry in replayed())


class Statuses(dict[str, FrameworkStatus]):
    """The status of frameworks by name; a table where it is shown."""

    def __repr__(self) -> str:
        return "\n".join(_status_lines(self.values())) or "no framework is known"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _status_table(self.values()).html()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: dataclasses.asdict(status) for name, status in self.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What the bridge did: how each framework is answered, the calls of each layer type, modules
    that `dataflow()` gave one of their own (how many of each class, by dataflow), replayed parts of
    models, prefetched maps, dataflows tuned for layers that share a map (`groups`, with the times
    that decided), other ways that calls take (`ways`), the layers of the model that was asked
    about, and how many child processes ran layers that are counted, too."""

    frameworks: tuple[FrameworkStatus, ...]
    layers: dict[str, dict[str, LayerCount]]
    dataflows: dict[str, dict[str, int]] = dataclasses.field(default_factory=given_dataflows)
    replays: tuple[ReplayCount, ...] = dataclasses.field(default_factory=replays)
    modules: tuple[ModuleReport, ...] = ()
    maps: MapCount = dataclasses.field(default_factory=prefetched)
    groups: tuple[str, ...] = dataclasses.field(default_factory=tuned_groups)
    children: int = 0
    ways: tuple[str, ...] = dataclasses.field(default_factory=open_ways)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The text of `to_dict()`, written to `path` where one is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        lines = [*_status_lines(self._used()), *self._idle_lines(), *self._dataflow_lines()]
        modules = [module_table(self.modules).plain()] if self.modules else []
        return "\n".join([*lines, *self._layer_lines(), *self._notes(), *modules])

    __repr__ = __str__  # what a terminal shows

    def _used(self) -> list[FrameworkStatus]:
        return [status for status in self.frameworks if status.imported or status.framework in self.layers]

    def _idle_lines(self) -> list[str]:
        """The frameworks that nobody has imported, in a line: there is nothing to say of them."""
        used = self._used()
        idle = [status.framework for status in self.frameworks if status not in used]
        return [f"enabled, not imported: {', '.join(idle)}"] if idle else []

    def _notes(self) -> list[str]:
        ending = "" if self.children == 1 else "es"
        children = [f"layers of {self.children} child process{ending} are counted"]
        notes = [*self.groups, *map(str, self.replays), *map_lines(self.maps), *self.ways]
        return [*(children if self.children else []), *notes]

    def _repr_html_(self) -> str:
        parts = [_status_table(used).html()] if (used := self._used()) else []
        parts.append(self._layer_table().html() if self._counted() else "<p>no layer has run</p>")
        notes = [*self._idle_lines(), *self._dataflow_lines(), *self._notes()]
        parts += [f"<p>{html.escape(line)}</p>" for line in notes]
        return "".join([*parts, *([module_table(self.modules).html()] if self.modules else [])])

    def _dataflow_lines(self) -> list[str]:
        return [
            f"{name} dataflow given to {', '.join(f'{n} {module}' for module, n in modules.items())}"
            for name, modules in sorted(self.dataflows.items())
        ]

    def _counted(self) -> list[tuple[str, ...]]:
        """Rows: framework, layer, bridged, original, why original."""
        rows: list[tuple[str, ...]] = []
        for framework, layers in sorted(self.layers.items()):
            for layer, count in sorted(layers.items()):
                why = "; ".join(f"{reason} ({n})" for reason, n in sorted(count.original.items()))
                total = sum(count.original.values())
                rows.append((framework, layer, str(count.bridged), str(total), why))
        return rows

    def _layer_table(self) -> Table:
        return Table("Layers", _LAYER_COLUMNS, self._counted())

    def _layer_lines(self) -> list[str]:
        rows = [tuple(column.name for column in _LAYER_COLUMNS), *self._counted()]
        if len(rows) == 1:
            return ["no layer has run"]
        w = [max(len(row[column]) for row in rows) for column in range(4)]
        return [f"{a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}  {e}".rstrip() for a, b, c, d, e in rows]


_LAYER_COLUMNS = (
    Column("framework", True),
    Column("layer", True),
    Column("bridged"),
    Column("original"),
    Column("why original", True),
)
_STATUS_COLUMNS = tuple(
    Column(name, True) for name in ("framework", "version", "mode", "why", "dataflow", "device", "notes")
)


def _status_lines(statuses: Iterable[FrameworkStatus]) -> list[str]:
    lines = []
    for status in statuses:
        mode = status.mode or "not enabled"
        named = f"{status.framework} {status.version}" if status.version else status.framework
        lines.append(f"{named}: {mode} ({status.reason})")
        if status.mode:
            lines.append(f"  {status.dataflow} dataflow on {status.device}")
        lines.extend(f"  {remark}" for remark in status.notes)
    return lines


def _status_table(statuses: Iterable[FrameworkStatus]) -> Table:
    rows = [
        (
            status.framework,
            status.version or "",
            status.mode or "not enabled",
            status.reason,
            *((status.dataflow, status.device) if status.mode else ("", "")),
            "; ".join(status.notes),
        )
        for status in statuses
    ]
    return Table("Frameworks", _STATUS_COLUMNS, rows)
