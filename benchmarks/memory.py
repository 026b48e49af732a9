"""Peak memory and time of wide decoder levels with and without a limit: `python -m
benchmarks.memory`.

Limits of a level (`memory_levels`): its peak without one by shares, and the lowest that passes.
Under each it runs as it is, for its peak and that of the bridge's layers, and with torch's
allocator capped to the limit and a tenth, so that what is reserved counts, too; of the lowest limit
the lowest cap that passes is looked for. The allocator gets expandable segments, unless its
settings are set.

On a CPU no allocator counts: there the limits are those of the engine's own arithmetic, and only
the lowest one is tried.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import sparse_bridge
from sparse_bridge.errors import MemoryLimitError
from sparse_bridge.tools.harness import results

from .memory_levels import LEVELS, MLPS, QUICK, Level, Network, network_of, surface

SCHEMA = 2
PART = 1 << 15  # rows
SHARES = (0.9, 0.75)
CAPS = (1.1, 1.25, 1.5)  # of the limit, for what the allocator reserves
MIB = 1 << 20


class Setup(NamedTuple):
    """What all levels have in common."""

    device: str
    dtype: torch.dtype
    rounds: int
    blocks: int
    part: int


class Measured(NamedTuple):
    """ms: median of a run.  allocated, reserved: peaks, in bytes; convolutions: the first while the
    bridge's layers compute; None on a CPU."""

    ms: float
    result: torch.Tensor
    allocated: int | None = None
    reserved: int | None = None
    convolutions: int | None = None


@contextmanager
def limited(limit: int | None) -> Iterator[None]:
    """Under a limit, of which the table says whether it was kept."""
    if limit is None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "under a memory limit", RuntimeWarning)
        with sparse_bridge.memory_limit(limit):
            yield


def measure(run: Network, device: str, rounds: int) -> Measured:
    """Of what has run before, so that nothing is compiled."""
    gpu, times = device == "cuda", []
    y = run().cpu()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    ms = statistics.median(times)
    if not gpu:
        return Measured(ms, y)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Measured(ms, y, *peaks, run.peak_of_convolutions())


def run_capped(run: Network, limit: int, cap: float) -> str:
    """How a run under the limit ends where torch's allocator may reserve `cap` times as much:
    "passes", or the name of its error."""
    whole = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * limit / whole))
    try:
        with limited(limit):
            run()
        torch.cuda.synchronize()
    except (MemoryLimitError, torch.OutOfMemoryError) as error:
        return type(error).__name__
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return "passes"


def least_of(run: Network) -> int:
    """The lowest limit under which a run passes: as errors tell it, step by step."""
    limit = 1
    while True:
        gc.collect()
        try:
            with limited(limit):
                run()
            return limit
        except MemoryLimitError as error:
            limit = error.least


def compare(
    name: str, level: Level, scene: tuple[torch.Tensor, int], api: str, mlp: str, setup: Setup
) -> list[dict[str, Any]]:
    """Rows of the table of one level through one API."""
    device, dtype, rounds, blocks, part = setup
    head, rows = {"level": name, "api": api, "mlp": mlp}, []
    with network_of(api, level, scene, mlp, part, device, dtype, blocks) as run:
        for _ in range(3):
            run()
        free = measure(run, device, rounds)
        rows.append(head | row_of(free, None, free.result))
        print(shown(rows[-1]), flush=True)
        shares = () if free.allocated is None else [int(s * free.allocated) for s in SHARES]
        least = least_of(run)
        for limit in (*shares, least):
            try:
                with limited(limit):
                    found = measure(run, device, rounds)
                row = head | row_of(found, limit, free.result)
                if device == "cuda":
                    tried = CAPS if limit == least else CAPS[:1]
                    row["capped"] = capped(run, limit, tried)
            except MemoryLimitError as error:
                why = f"least: {error.least / MIB:.1f} MiB"
                row = head | {"limit_mib": limit / MIB, "error": why}
            rows.append(row)
            print(shown(row), flush=True)
    return rows


def row_of(found: Measured, limit: int | None, result: torch.Tensor) -> dict[str, Any]:
    """What was measured, in MiB.  result: of a run without a limit."""
    sizes = {
        "limit": limit,
        "allocated": found.allocated,
        "reserved": found.reserved,
        "convolutions": found.convolutions,
    }
    row: dict[str, Any] = {f"{key}_mib": n and n / MIB for key, n in sizes.items()}
    row |= {"ms": found.ms, "same_bits": torch.equal(found.result, result)}
    if limit is not None and found.allocated is not None and found.convolutions is not None:
        row["kept"] = found.allocated <= limit
        row["convolutions_kept"] = found.convolutions <= limit
    return row


def capped(run: Network, limit: int, caps: tuple[float, ...]) -> dict[str, str]:
    """How runs ended by their cap, up to the first that passed."""
    ends: dict[str, str] = {}
    for cap in caps:
        ends[f"{cap:g}"] = run_capped(run, limit, cap)
        if ends[f"{cap:g}"] == "passes":
            break
    return ends


def shown(row: dict[str, Any]) -> str:
    """A row of the table."""
    limit = "none" if row["limit_mib"] is None else f"{row['limit_mib']:.1f}"
    head = f"{row['level']:11} {row['api']:10} {row['mlp']:6} {limit:>9}"
    if "error" in row:
        return f"{head}  {row['error']}"
    peaks = (row[f"{kind}_mib"] for kind in ("allocated", "convolutions", "reserved"))
    cells = " ".join("        -" if one is None else f"{one:9.1f}" for one in peaks)
    ends = [f"cap {cap}: {end}" for cap, end in row.get("capped", {}).items()]
    parts = ["same" if row["same_bits"] else "OTHER", *verdict(row), *ends]
    return f"{head} {cells} {row['ms']:9.2f}  {'; '.join(parts)}"


def verdict(row: dict[str, Any]) -> list[str]:
    """Whether the peak kept to the limit, and if not, whose it was."""
    if "kept" not in row:
        return []
    if row["kept"]:
        return ["kept"]
    owner = "torch's" if row["convolutions_kept"] else "the bridge's"
    return [f"exceeded by {row['allocated_mib'] - row['limit_mib']:.1f} MiB, {owner} layers"]


def main(given: list[str] | None = None) -> int:
    """Print a table and write JSON; 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("levels", nargs="*", help=f"of {', '.join(LEVELS)}")
    parser.add_argument("--api", nargs="+", default=["flex_gemm", "spconv"])
    parser.add_argument("--mlp", nargs="+", choices=MLPS, default=list(MLPS))
    kinds = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=kinds, help="default: float16 on a GPU, else float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=4, help="of a level (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small level, for a CPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args(given)
    device, levels = "cuda" if torch.cuda.is_available() else "cpu", QUICK if args.quick else LEVELS
    if device == "cuda":
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # read with the first tensor
            os.environ.setdefault(name, "expandable_segments:True")
    if args.json:
        results.require_writable(args.json, "--json")
    dtype = getattr(torch, args.dtype or ("float16" if device == "cuda" else "float32"))
    setup = Setup(device, dtype, args.rounds, args.blocks, 256 if args.quick else PART)
    print("level       api        MLP    limit MiB allocated  in convs  reserved        ms  bits; limit; caps")
    rows = []
    for name in args.levels or levels:
        scene = surface(levels[name].rows)
        for api in args.api:
            for mlp in args.mlp:
                rows += compare(name, levels[name], scene, api, mlp, setup)
    if args.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        results.save(args.json, SCHEMA, {"device": name, "torch": torch.__version__, "rows": rows})
    return int(any(not row.get("same_bits", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
