"""Which tile serves a problem: by stored winners, by tuning, or by rule.

`SPARSE_BRIDGE_TUNE` says how. *cached* (default): a winner of the disk cache, else one shipped with
the package, else that of a bucket one octave away, else the default tile; nothing is timed. *off*:
the default tile. *pinned*: as cached, from one file or the package alone. *full*: a bucket without
a winner is tuned, but not in a process group of several ranks: those wait for one another, and
choose alike; nor under a memory limit, above which results to compare with may come.

Tuning. The first layer of a new bucket queues its candidates for compiling in the background and
goes on with the tile it would have had. A later layer of that bucket, with the next map, takes
`BUDGET` seconds at most, once: a cost model has picked `COUNT` candidates, each is checked against
the default tile's result on the layer's own inputs, in memory full of NaN, then timed; the fastest
is stored if it beats the default by `GAIN`. One process tunes a bucket; others wait `WAIT` seconds
for it and otherwise go on.

A choice holds for the process and is made once per plan. Results and gradients of inputs have the
same bits in every tile: a candidate that has others is refused. Gradients of weights do not: their
tiles differ in the order of sums over rows, so another process may find other winners in the cache
and round differently, and *full* changes the tile while it runs. *off* and *pinned* give the same
bits in every process on the same GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ... import folders, log, memory, settings, state
from .background import Compiler
from .cost import shortlist
from .groups import GroupTable, GroupWinner
from .problem import Bucket, Problem
from .ranks import one_of_several
from .trial import Timer, Trial, device_timer, mismatch, reference_of
from .tune_cache import Contents, Stamp, TuneCache, Winner, Winners, pinned, shipped

if TYPE_CHECKING:
    from ...kernels.runtime.target import Target
    from ...kernels.tiles.tile import TileConfig

__all__ = ["Result", "Trial", "Tuner", "current", "final", "tile_for", "use"]

BUDGET = 0.3  # seconds that a bucket may cost the layers that meet it, all told
WAIT = 0.3  # seconds to wait for another process that tunes the same bucket
COUNT = 6  # tiles timed per bucket, the default among them
GAIN = 0.03  # share by which a winner beats the default tile; less is noise
_CLOSE = 1.1  # finalists within this factor of the fastest are timed again


@dataclasses.dataclass(frozen=True)
class Result:
    """What tuning found for a bucket. winner None: no answer, for the reason `why`; the tile stays
    as it was.  refused: candidates that cannot run or compute something else, and why."""

    bucket: Bucket
    winner: Winner | None
    refused: dict[TileConfig, str]
    why: str = ""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """tile: None for the default.  final: nothing more can be learnt in this process."""

    tile: TileConfig | None
    final: bool


class DeviceTiles:
    """The winners of one device under one setting, and the choices made from them."""

    def __init__(self, mode: str, tune_file: str, stamp: Stamp, again: bool) -> None:
        self.cache = None if mode == "pinned" else TuneCache(folders.cache(), stamp)
        self.again = again
        files: list[Contents] = []
        if self.cache is None:
            files = pinned(tune_file) if tune_file else shipped(stamp)
        elif not again:
            files = [self.cache.contents(), *shipped(stamp)]
        self.sources: list[Winners] = [file.winners for file in files]
        self.groups = GroupTable(file.groups for file in files)
        self.choices: dict[Bucket, _Choice] = {}
        self.empty = not any(any(source.values()) for source in self.sources)
        if self.empty and mode == "pinned" and not tune_file:
            log.once(
                ("pinned", stamp.file_name),
                f"SPARSE_BRIDGE_TUNE=pinned: the package has no tuned tiles for {stamp.device}; "
                "tiles are chosen by rule.",
                logging.WARNING,
            )

    def choose(self, bucket: Bucket, problem: Problem) -> _Choice:
        """The choice for a bucket that has none yet."""
        choice = _Choice(None, False)
        for near in (bucket, *bucket.neighbours()):
            tile = self._find(near, problem, self.sources)
            if tile is not None:
                choice = _Choice(tile, near == bucket)
                break
        return self.choices.setdefault(bucket, choice)

    def _find(self, bucket: Bucket, problem: Problem, sources: list[Winners]) -> TileConfig | None:
        for source in sources:
            winner = source.get(bucket.direction, {}).get(str(bucket))
            if winner is not None and problem.allows(winner.tile):
                return winner.tile
        return None

    def stored(self, bucket: Bucket, problem: Problem) -> TileConfig | None:
        """The winner that another process has stored meanwhile."""
        if self.cache is None or self.again:
            return None
        return self._find(bucket, problem, [self.cache.load()])

    def store(self, bucket: Bucket, winner: Winner) -> None:
        """Keep a winner for later processes; nothing where the package's own are pinned."""
        if self.cache is not None:
            self.cache.store(bucket.direction, str(bucket), winner)


class Tuner:
    """Chooses tiles. One serves the process; commands and tests put their own in its place.

    timer: how runs are timed; None: device events, on real GPUs only.  how: "background" as told
    above, "blocking" compiles and tunes at once, "compile" only compiles what would be timed.
    budget, wait, count: see the module's text.  again: as if there were no winners yet.  clock: of
    the budget, in seconds.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        how: str = "background",
        budget: float = BUDGET,
        wait: float = WAIT,
        count: int = COUNT,
        again: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.timer, self.how, self.budget, self.wait = timer, how, budget, wait
        self.count, self.again, self.clock = count, again, clock
        self.results: list[Result] = []
        self.groups: list[GroupWinner] = []
        self.compiler = Compiler()
        self.by_device: dict[tuple[object, ...], DeviceTiles] = {}
        self._busy = threading.Lock()

    def tile_for(self, problem: Problem, trial: Trial | None = None) -> TileConfig:
        """The tile of a problem; trial: its tensors, without which nothing is tuned."""
        now = settings.get()
        if now.tune == "off":
            return problem.default()
        tiles = self._winners_of(now, problem.device, problem.target)
        full = now.tune == "full"
        if tiles.empty and not full:
            return problem.default()
        bucket = problem.bucket()
        choice = tiles.choices.get(bucket) or tiles.choose(bucket, problem)
        if full and trial is not None and not choice.final:
            choice = self._learn(tiles, bucket, problem, trial, choice)
        return problem.default() if choice.tile is None else choice.tile

    def winners_of(self, device: torch.device, target: Target) -> DeviceTiles | None:
        """The winners of a device under the settings in force; None with tuning off."""
        now = settings.get()
        return None if now.tune == "off" else self._winners_of(now, device, target)

    def _winners_of(self, now: settings.Settings, device: torch.device, target: Target) -> DeviceTiles:
        key = (now.tune, now.tune_file, now.cache_dir, device, target.arch)
        tiles = self.by_device.get(key)
        if tiles is None:
            stamp = Stamp.of(device, target)
            tiles = self.by_device.setdefault(key, DeviceTiles(now.tune, now.tune_file, stamp, self.again))
        return tiles

    def _learn(self, tiles: DeviceTiles, bucket: Bucket, problem: Problem, trial: Trial, choice: _Choice) -> _Choice:
        if (self.timer is None and not problem.target.raw) or _capturing(problem.device):
            return choice
        if memory.limit is not None or one_of_several():
            return choice
        if not self._busy.acquire(blocking=False):
            return choice  # another thread of this process tunes
        try:
            with torch.no_grad():
                if not self._compiled(bucket, problem, trial):
                    return choice
                tile = self._tune(tiles, bucket, problem, trial)
                choice = _Choice(choice.tile if tile is None else tile, True)
                tiles.choices[bucket] = choice
        finally:
            self._busy.release()
        return choice

    def _compiled(self, bucket: Bucket, problem: Problem, trial: Trial) -> bool:
        """Whether the candidates are compiled; if not, they will be."""
        background = self.how == "background"
        if background and not self.compiler.takes(bucket):
            return self.compiler.has_run(bucket)
        runs = [partial(trial.run, tile) for tile in shortlist(problem, trial.live, self.count)]
        if background:
            self.compiler.submit(bucket, problem.device, runs)
            return False
        for run in runs:
            with _refusal({}, run.args[0]):
                run()
        return True

    def _tune(self, tiles: DeviceTiles, bucket: Bucket, problem: Problem, trial: Trial) -> TileConfig | None:
        if self.how == "compile" or tiles.cache is None:
            return None
        with tiles.cache.claim(bucket.direction, str(bucket), self.wait) as mine:
            tile = tiles.stored(bucket, problem)
            if tile is not None or not mine:
                return tile
            try:
                result = self.race(bucket, problem, trial)
            except torch.cuda.OutOfMemoryError:
                log.logger.info("no memory to tune %s", bucket)
                return None
            self.results.append(result)
            if result.winner is None:
                return None
            tiles.store(bucket, result.winner)
            return result.winner.tile

    def race(self, bucket: Bucket, problem: Problem, trial: Trial) -> Result:
        """Check and time the candidates until the budget is spent."""
        start = self.clock()
        default, *others = shortlist(problem, trial.live, self.count)
        refused: dict[TileConfig, str] = {}
        reference = reference_of(trial, default)
        if reference is None:
            return Result(bucket, None, refused, "the default tile's result proves nothing")
        share = self.budget / (self.count + 3)
        times = {default: self._time(trial, default, share)}
        for tile in others:
            if self.clock() - start + share > self.budget:
                break
            with _refusal(refused, tile):
                wrong = mismatch(
                    trial.run(tile), reference, problem.dtype, problem.precision, exact=problem.direction != "wgrad"
                )
                if wrong is None:
                    times[tile] = self._time(trial, tile, share)
                else:
                    refused[tile] = wrong
        for tile, reason in refused.items():
            log.logger.info("tile %s is out of the race for %s: %s", tile, bucket, reason)
        if len(times) == 1 and not refused and others:
            return Result(bucket, None, refused, "the default tile took all the time there was")
        self._settle(trial, times, share, start)
        best = min(times, key=lambda tile: times[tile])
        if times[best] > (1 - GAIN) * times[default]:
            best = default
        winner = Winner(best, 1e6 * times[best], 1e6 * times[default], len(times))
        return Result(bucket, winner, refused)

    def _settle(self, trial: Trial, times: dict[TileConfig, float], share: float, start: float) -> None:
        """Time the tiles that lie close to the fastest once more, as long as there is time."""
        limit = _CLOSE * min(times.values())
        close = sorted((t for t in times if times[t] <= limit), key=lambda tile: times[tile])[:3]
        for tile in close if len(close) > 1 else ():
            if self.clock() - start + share <= self.budget:
                times[tile] = min(times[tile], self._time(trial, tile, share))

    def _time(self, trial: Trial, tile: TileConfig, limit: float) -> float:
        return (self.timer or device_timer)(trial.repeat(tile), limit)


@contextlib.contextmanager
def _refusal(refused: dict[TileConfig, str], tile: TileConfig) -> Iterator[None]:
    """A candidate that cannot be built or run here loses, whatever its compiler raises; only the
    default tile's failures are the layer's."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        refused[tile] = f"{type(error).__name__}: {error}"


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_tuner = _DEFAULT = Tuner()


def tile_for(problem: Problem, trial: Trial | None = None) -> TileConfig:
    """The tile that serves `problem` in this process."""
    return _tuner.tile_for(problem, trial)


def current() -> Tuner:
    """The tuner of this process."""
    return _tuner


def final() -> bool:
    """Whether what `tile_for` answers will hold as long as the settings do."""
    return _tuner is _DEFAULT and settings.get().tune != "full"


@state.owns
def reset() -> None:
    """Forget what the process's own tuner has found; winners on disk are read again."""
    _DEFAULT.by_device, _DEFAULT.results, _DEFAULT.groups = {}, [], []


@contextlib.contextmanager
def use(tuner: Tuner) -> Iterator[Tuner]:
    """Let `tuner` choose for the length of a `with` block (process-wide)."""
    global _tuner
    previous, _tuner = _tuner, tuner
    try:
        yield tuner
    finally:
        _tuner = previous
