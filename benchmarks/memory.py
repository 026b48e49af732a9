"""Peak memory and time of wide decoder levels with and without a limit: `python -m
benchmarks.memory`.

Limits of a level (`memory_levels`): its peak without one by shares, the lowest that the bridge's
layers pass, and the lowest that the whole process does, torch's own layers included. Under each
there are two runs. One resets the allocator's peaks between layers, so that it gives those of the
bridge's layers and comes to an end where torch's exceed the limit. The other says what a program
gets: "passes", or the least that MemoryLimitError names. Limits that pass are run once more with
torch's allocator capped to the limit and a tenth, so that what is reserved counts, too; of the
lowest limits the lowest cap that passes is looked for. The allocator gets expandable segments,
unless its settings are set.

On a CPU no allocator counts: there the limits are those of the engine's own arithmetic, and only
the lowest one is tried.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import sparse_bridge
from sparse_bridge.errors import MemoryLimitError
from sparse_bridge.tools.harness import results

from .memory_levels import LEVELS, MLPS, QUICK, Level, Network, network_of, surface

SCHEMA = 3
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


def settle() -> None:
    """Let go of what earlier runs left, and of the allocator's peaks: an earlier one hides others."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(run: Network, device: str, rounds: int) -> Measured:
    """Of what has run before, so that nothing is compiled."""
    gpu, times = device == "cuda", []
    with run.watched():
        y = run().cpu()
    settle()
    with run.watched() as peaks:
        for _ in range(rounds):
            begin = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
    ms = statistics.median(times)
    return Measured(ms, y, peaks.allocated, peaks.reserved, peaks.convolutions) if gpu else Measured(ms, y)


def run_capped(run: Network, limit: int, cap: float) -> str:
    """How a run under the limit ends where torch's allocator may reserve `cap` times as much:
    "passes", or the name of its error."""
    whole = torch.cuda.get_device_properties(0).total_memory
    settle()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * limit / whole))
    try:
        with sparse_bridge.memory_limit(limit):
            run()
        torch.cuda.synchronize()
    except (MemoryLimitError, torch.OutOfMemoryError) as error:
        return type(error).__name__
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return "passes"


def run_layers(run: Network) -> None:
    """Run it so that what torch's layers take is not held against a limit."""
    with run.watched():
        run()


def refused(run: Callable[[], object], limit: int) -> MemoryLimitError | None:
    """The error of a run under a limit; None where it passes."""
    settle()
    try:
        with sparse_bridge.memory_limit(limit):
            run()
    except MemoryLimitError as error:
        return error.with_traceback(None)  # whose frames hold tensors
    return None


def least_of(run: Callable[[], object], limit: int = 1) -> int:
    """The lowest limit from `limit` on under which a run passes: as errors tell it, step by step."""
    while (error := refused(run, limit)) is not None:
        limit = error.least
    return limit


def compare(
    name: str, level: Level, scene: tuple[torch.Tensor, int], api: str, mlp: str, setup: Setup
) -> list[dict[str, Any]]:
    """Rows of the table of one level through one API."""
    device, dtype, rounds, blocks, part = setup
    rows: list[dict[str, Any]] = []
    with network_of(api, level, scene, mlp, part, device, dtype, blocks) as run:

        def add(row: dict[str, Any]) -> None:
            rows.append({"level": name, "api": api, "mlp": mlp} | row)
            print(shown(rows[-1]), flush=True)

        for _ in range(3):
            run()
        free = measure(run, device, rounds)
        add(row_of(free, None, free.result))
        shares = [] if free.allocated is None else [int(s * free.allocated) for s in SHARES]
        of_layers = least_of(functools.partial(run_layers, run))
        of_process = least_of(run, of_layers)
        for limit in dict.fromkeys((*shares, of_layers, of_process)):
            try:
                with sparse_bridge.memory_limit(limit):
                    found = measure(run, device, rounds)
            except MemoryLimitError as error:
                add({"limit_mib": limit / MIB, "least_of_layers_mib": error.least / MIB})
                continue
            row, refusal = row_of(found, limit, free.result), refused(run, limit)
            if refusal is not None:
                row["least_of_process_mib"] = refusal.least / MIB
            elif device == "cuda":
                row["capped"] = capped(run, limit, CAPS[:1] if limit in shares else CAPS)
            add(row)
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
    if limit is not None and found.convolutions is not None:
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
    if "least_of_layers_mib" in row:
        return f"{head}  error; least for the layers: {row['least_of_layers_mib']:.1f} MiB"
    peaks = (row[f"{kind}_mib"] for kind in ("allocated", "convolutions", "reserved"))
    cells = " ".join("        -" if one is None else f"{one:9.1f}" for one in peaks)
    ends = [f"cap {cap}: {end}" for cap, end in row.get("capped", {}).items()]
    parts = ["same" if row["same_bits"] else "OTHER", *verdict(row), *ends]
    return f"{head} {cells} {row['ms']:9.2f}  {'; '.join(parts)}"


def verdict(row: dict[str, Any]) -> list[str]:
    """What a program gets, and whether the bridge's layers kept to the limit."""
    if row["limit_mib"] is None:
        return []
    if "least_of_process_mib" in row:
        parts = [f"error; least for the process: {row['least_of_process_mib']:.1f} MiB"]
    else:
        parts = ["passes"]
    if not row.get("convolutions_kept", True):
        parts.append(f"exceeded by {row['convolutions_mib'] - row['limit_mib']:.1f} MiB in the bridge's layers")
    return parts


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
    print("level       api        MLP    limit MiB allocated  in convs  reserved        ms  bits; outcome; caps")
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
