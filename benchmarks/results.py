"""What a run found: figures per case and peer, ratios between peers, and the JSON of it all."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparse_bridge import tolerances
from sparse_bridge.errors import ShapeError
from sparse_bridge.tools.harness import results

__all__ = ["SCHEMA", "Comparison", "Figure", "Ratio", "Run", "load_run", "merge", "quartiles"]

SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A peer's figure divided by the base's: median over rounds, first and third quartile."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """faster, slower, or even where the quartiles lie on both sides of 1."""
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "even"


@dataclasses.dataclass
class Figure:
    """One case on one peer.

    Attributes:
        case: the name; `suite`, `scene`, `subject`, `dtype`, `work` are its parts.
        label: the work in words.
        rows: voxels; `pairs`: pairs of a 3x3x3 layer; `channels`: 0 for networks.
        ms: median over all calls, milliseconds; `low`, `high`: its quartiles.
        p90: nine of ten calls take less.  busy_ms: of a call, in which the GPU works.
        rounds: median of each round; round i of all peers ran one after the other.
        peak_mb, total_mb: memory of one call on top of its inputs, and in all.
        held_mb: what stays between calls on top of inputs and weights; None where not known.
        first_s: the first call of the process, seconds.
        floor_ms: see `floor`.
        check: what the result looked like: api, rows, root mean square.
        error: why there is no figure.
        ratio: (median, low, high) to the base where only that was recorded.
    """

    case: str
    peer: str
    suite: str
    scene: str
    subject: str
    dtype: str
    work: str
    label: str
    rows: int = 0
    pairs: int | None = None
    channels: int = 0
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    p90: float | None = None
    busy_ms: float | None = None
    rounds: list[float] = dataclasses.field(default_factory=list)
    samples: int = 0
    peak_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None
    first_s: float | None = None
    floor_ms: float | None = None
    check: dict[str, Any] | None = None
    error: str | None = None
    ratio: list[float] | None = None

    def add(self, rounds: Sequence[Sequence[float]]) -> None:
        """Summarise the milliseconds of every call of every round."""
        calls = [one for found in rounds for one in found]
        if calls:
            self.low, self.ms, self.high = quartiles(calls)
            self.p90 = sorted(calls)[math.ceil(0.9 * len(calls)) - 1]
            self.rounds = [statistics.median(found) for found in rounds]
            self.samples = len(calls)

    @property
    def memory_mb(self) -> float | None:
        """Peak of a call and what is held between calls."""
        return None if self.peak_mb is None else self.peak_mb + (self.held_mb or 0.0)

    @property
    def floor_share(self) -> float | None:
        return self.floor_ms / self.ms if self.floor_ms and self.ms else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The figures of one case, base first; a peer may be missing."""

    base: Figure
    others: list[Figure]

    def ratio(self, other: Figure) -> Ratio | None:
        """Time of `other` divided by the base's, round by round where rounds are known."""
        if other.ratio is not None:
            return Ratio(*other.ratio)
        if not self.base.ms or not other.ms:
            return None
        paired = list(zip(self.base.rounds, other.rounds, strict=False))
        if not paired:
            value = other.ms / self.base.ms
            return Ratio(value, value, value)
        low, middle, high = quartiles([mine / base for base, mine in paired])
        return Ratio(middle, low, high)

    def memory(self, other: Figure) -> float | None:
        """Peak memory of `other`, with what it holds between calls, divided by the base's."""
        base, mine = self.base.memory_mb, other.memory_mb
        return None if not base or mine is None else mine / base

    def disagrees(self, other: Figure) -> bool:
        """Whether the two results cannot be the same answer."""
        mine, base = other.check, self.base.check
        if not mine or not base or mine["api"] != base["api"]:
            return False
        if mine["rows"] != base["rows"] or mine["rms"] is None or base["rms"] is None:
            return mine != base
        limit = tolerances.of("peers", other.dtype).rms
        return abs(mine["rms"] - base["rms"]) > limit * abs(base["rms"])


@dataclasses.dataclass
class Run:
    """A run, as it is stored.

    Attributes:
        peers: the first one is the base of all ratios.
        machine: facts of the machine; `versions`: per peer, package -> version.
        rates: per dtype, multiply-adds x 2 and bytes per second as probed.
        command, started: how and when.
        notes: what the reader must know, such as a peer that did not start.
    """

    peers: list[str]
    figures: list[Figure] = dataclasses.field(default_factory=list)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    rates: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    command: str = ""
    started: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)

    def comparisons(self) -> list[Comparison]:
        """Cases in the order of the run; the base of a case is the first peer that has it."""
        cases: dict[str, dict[str, Figure]] = {}
        for figure in self.figures:
            cases.setdefault(figure.case, {})[figure.peer] = figure
        found = []
        for by_peer in cases.values():
            ordered = [by_peer[peer] for peer in self.peers if peer in by_peer]
            found.append(Comparison(ordered[0], ordered[1:]))
        return found

    def save(self, path: Path) -> None:
        """Write the JSON; a reader never sees half of it."""
        results.save(path, SCHEMA, dataclasses.asdict(self))


def load_run(path: Path) -> Run:
    """Read a run, also one of the earlier formats.

    Raises:
        ShapeError: the file is no such record.
    """
    from . import legacy

    try:
        schema, content = results.read(path)
        if schema == SCHEMA:
            figures = [Figure(**one) for one in content.pop("figures")]
            return Run(figures=figures, **content)
        return legacy.convert(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShapeError(
            f"{path}: not a record of a benchmark run ({type(error).__name__}: {error}); expected "
            "the file that `python -m sparse_bridge bench --json` writes."
        ) from error


def merge(runs: Iterable[Run]) -> Run:
    """Several runs as one, for a common report; the first run's peers come first."""
    first, *others = runs
    merged = dataclasses.replace(first, figures=list(first.figures), notes=list(first.notes))
    merged.peers = list(first.peers)
    for run in others:
        merged.peers += [peer for peer in run.peers if peer not in merged.peers]
        merged.figures += run.figures
        merged.versions = {**run.versions, **merged.versions}
        merged.rates = {**run.rates, **merged.rates}
        merged.notes += [note for note in run.notes if note not in merged.notes]
        if run.machine != merged.machine:
            merged.notes.append(f"Another run's machine: {run.machine}")
    return merged


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
