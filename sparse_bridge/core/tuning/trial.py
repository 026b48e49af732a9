"""Trying a tile on the real inputs of a problem: is its result right, and how long does it take?"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ... import tolerances

if TYPE_CHECKING:
    from ...kernels.tiles.tile import TileConfig

# (run it once, seconds the measurement may take) -> seconds per run
Timer = Callable[[Callable[[], object], float], float]

_CHUNK = 1 << 22  # elements compared at a time
_HOLD = 400_000  # clock cycles that the device waits while the host queues the launches
_INNER, _LEAST, _MOST = 4, 3, 12  # launches per sample, samples


class TileLists(Protocol):
    """What tiles of rows visit: `TileList`, or the pairs by offset."""

    def lists(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(int32 [tiles, n]: what tiles of `block_m` rows visit, int32 or bool [tiles]: how many blocks each of them
        visits)."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A problem with its tensors.

    build: tile -> plan, called as plan(*inputs, result).  fresh: new memory for a result, of the product's shape and
    dtype.  table: what a gather-GEMM follows (`TileList`, nbr int32 [V, N] or pairs by offset), None for wgrad.
    """

    build: Callable[[TileConfig], Any]
    inputs: tuple[Any, ...]
    fresh: Callable[[], torch.Tensor]
    table: TileLists | torch.Tensor | None = None

    def run(self, tile: TileConfig, poison: float = math.nan) -> torch.Tensor:
        """The result with `tile`; elements that were not written hold `poison`."""
        result = self.fresh().fill_(poison)
        self.build(tile)(*self.inputs, result)
        return result

    def repeat(self, tile: TileConfig) -> Callable[[], object]:
        """A function that computes the result once more, into the same memory."""
        plan, result = self.build(tile), self.fresh()
        return lambda: plan(*self.inputs, result)

    def live(self, block_m: int) -> int:
        """(row tile, offset) blocks that tiles of `block_m` rows visit. Waits for the device."""
        if self.table is None:
            return 0
        if isinstance(self.table, torch.Tensor):
            n_offsets, n_rows = self.table.shape
            return n_offsets * -(-n_rows // block_m)
        from ...kernels.maps.tile_list import shared_by

        return int(self.table.lists(block_m)[1].sum()) * shared_by(block_m)


def reference_of(trial: Trial, tile: TileConfig) -> torch.Tensor | None:
    """The result of the default tile, of the shape and dtype of `trial.fresh`, to compare others with. None if it
    proves nothing: if not all of it was written, if it is zero or not finite throughout, or if it does not repeat."""
    first, second = trial.run(tile), trial.run(tile, poison=113.0)
    same = torch.equal(torch.nan_to_num(first, nan=7.0), torch.nan_to_num(second, nan=7.0))
    telling = (torch.isfinite(first) & (first != 0)).any()
    return first if same and bool(telling) else None


def mismatch(
    result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, precision: str, exact: bool
) -> str | None:
    """How `result` differs from `reference`, of one shape and dtype, or None. dtype, precision: of the products.

    exact: in any bit, as rows of a gather-GEMM must not; else beyond rounding, for sums over rows,
    whose order a tile may change.
    """
    got, want = result.reshape(-1), reference.reshape(-1)
    # Elements that are not finite or not the same, largest error, its squares, squares of values.
    totals = got.new_zeros(4, dtype=torch.float64)
    for a, b in zip(got.split(_CHUNK), want.split(_CHUNK), strict=True):
        finite = torch.isfinite(b)
        other = (a != b) & ~(a.isnan() & b.isnan())
        wrong = other if exact else torch.where(finite, ~torch.isfinite(a), other)
        b = torch.where(finite, b, 0).float()
        error = torch.where(finite & ~wrong, a.float() - b, 0).abs()
        totals[0] += wrong.sum()
        totals[1] = torch.maximum(totals[1], error.max())
        totals[2] += error.double().square().sum()
        totals[3] += b.double().square().sum()
    count, largest, squares, norm = totals.tolist()
    if count:
        fault = "have other bits" if exact else "are unwritten or not finite"
        return f"{count:.0f} elements {fault}"
    scale = math.sqrt(norm / max(1, want.numel())) or 1.0
    rms = math.sqrt(squares / max(1, want.numel())) / scale
    limit, rms_limit = tolerances.of("product", precision if dtype == torch.float32 else dtype)
    if largest / scale > limit or rms > rms_limit:
        worst = f"largest error {largest / scale:.1e} (limit {limit:.0e})"
        return f"{worst}, RMS {rms:.1e} (limit {rms_limit:.0e})"
    return None


def device_timer(run: Callable[[], object], limit: float) -> float:
    """Median seconds per run by events of the current GPU, in about `limit` seconds."""
    begin = time.perf_counter()
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: list[float] = []
    inner = 1
    while len(samples) < _LEAST or (len(samples) < _MOST and time.perf_counter() - begin < limit):
        torch.cuda._sleep(_HOLD)
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / inner / 1e3)
        if time.perf_counter() - begin > limit and len(samples) > 1:
            break
        inner = _INNER if samples[0] < limit / (4 * _INNER * _LEAST) else 1
    return statistics.median(samples[1:])
