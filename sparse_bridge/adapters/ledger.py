"""Which layers ran here and which ran in the original framework, and why.

Adapters call `note` once per layer call; everything else reads.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading

from .. import settings
from ..errors import UnsupportedError
from .base import FrameworkStatus

Tally = dict[tuple[str, str, str | None], int]

_tally: Tally = {}
_strict: dict[str, bool | None] = {}
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


def is_strict(framework: str) -> bool:
    """Whether an unbridged call raises: the choice made in `enable()`, otherwise the setting."""
    chosen = _strict.get(framework)
    return settings.get().strict if chosen is None else chosen


def set_strict(framework: str, strict: bool | None) -> None:
    """Choose strict mode for one framework; None leaves it to the setting."""
    _strict[framework] = strict


def reset() -> None:
    """Forget all counts."""
    with _lock:
        _tally.clear()


def snapshot() -> Tally:
    """A copy of the raw counts, to tell later what was added."""
    with _lock:
        return dict(_tally)


def since(before: Tally, now: Tally | None = None) -> Tally:
    """What was counted between two snapshots (the second one defaults to now)."""
    now = snapshot() if now is None else now
    # after a reset() in between, everything that is there counts as new
    added = {
        key: n - before.get(key, 0) if n >= before.get(key, 0) else n for key, n in now.items()
    }
    return {key: n for key, n in added.items() if n}


def counts(tally: Tally | None = None) -> dict[str, dict[str, LayerCount]]:
    """Counts by framework, then layer type; of the whole process, or of `tally`."""
    grouped: dict[str, dict[str, LayerCount]] = {}
    for (framework, layer, reason), n in (snapshot() if tally is None else tally).items():
        layers = grouped.setdefault(framework, {})
        seen = layers.get(layer, LayerCount(0, {}))
        if reason is None:
            layers[layer] = LayerCount(seen.bridged + n, seen.original)
        else:
            layers[layer] = LayerCount(seen.bridged, {**seen.original, reason: n})
    return grouped


def given_dataflows() -> dict[str, dict[str, int]]:
    """See `Report.dataflows`; imports nothing."""
    override = sys.modules.get("sparse_bridge.core.conv.override")
    return {} if override is None else override.listed()


@dataclasses.dataclass(frozen=True)
class ReplayCount:
    """A part of a model that `optimize="graphs"` found: its class, calls that were replayed, graphs
    that are held, and why none is captured any more, or was not."""

    name: str
    calls: int
    graphs: int
    reason: str | None

    def __str__(self) -> str:
        text = f"{self.name}: {self.calls} calls replayed from {self.graphs} graphs"
        return text if self.reason is None else f"{text}; {self.reason}"


def replays() -> tuple[ReplayCount, ...]:
    """Parts of models that are replayed, or were tried."""
    units = sys.modules.get("sparse_bridge.core.capture.units")
    return () if units is None else tuple(ReplayCount(*one) for one in units.summary())


@dataclasses.dataclass(frozen=True)
class Report:
    """What the bridge did: how each framework is answered, the calls of each layer type,
    modules that `dataflow()` gave one of their own (how many of each class, by dataflow), and parts
    of models that are replayed."""

    frameworks: tuple[FrameworkStatus, ...]
    layers: dict[str, dict[str, LayerCount]]
    dataflows: dict[str, dict[str, int]] = dataclasses.field(default_factory=given_dataflows)
    replays: tuple[ReplayCount, ...] = dataclasses.field(default_factory=replays)

    def __str__(self) -> str:
        lines = [*self._status_lines(), *self._dataflow_lines(), *self._layer_lines()]
        return "\n".join([*lines, *map(str, self.replays)])

    def _dataflow_lines(self) -> list[str]:
        return [
            f"{name} dataflow given to {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"
            for name, kinds in sorted(self.dataflows.items())
        ]

    def _status_lines(self) -> list[str]:
        lines = []
        for status in self.frameworks:
            mode = status.mode or "not enabled"
            named = f"{status.framework} {status.version}" if status.version else status.framework
            lines.append(f"{named}: {mode} ({status.reason})")
            if status.mode:
                lines.append(f"  {status.dataflow} dataflow on {status.device}")
            lines.extend(f"  {remark}" for remark in status.notes)
        return lines

    def _layer_lines(self) -> list[str]:
        rows = [("framework", "layer", "bridged", "original", "why original")]
        for framework, layers in sorted(self.layers.items()):
            for layer, count in sorted(layers.items()):
                why = "; ".join(f"{reason} ({n})" for reason, n in sorted(count.original.items()))
                total = sum(count.original.values())
                rows.append((framework, layer, str(count.bridged), str(total), why))
        if len(rows) == 1:
            return ["no layer has run"]
        w = [max(len(row[column]) for row in rows) for column in range(4)]
        return [
            f"{a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}  {e}".rstrip()
            for a, b, c, d, e in rows
        ]
