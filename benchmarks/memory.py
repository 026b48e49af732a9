"""Peak memory and time of wide decoder levels with and without a limit: `python -m
benchmarks.memory`.

Levels have the rows and channels of TRELLIS.2's decoder, voxels of a surface; blocks are
ConvNeXt's: a submanifold 3x3x3 convolution, a layer norm, and an MLP of four times the width, whose
linear layers are torch's own. "cut MLP": the program gives the MLP 32,768 rows at a time. Limits: a
level's peak without one by shares, and the lowest that passes. Under each a level runs twice: as it
is, for its peak, and with torch's allocator capped to the limit and a tenth, so that what is
reserved counts, too. The allocator gets expandable segments, unless its settings are set.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

import sparse_bridge
from sparse_bridge.errors import MemoryLimitError
from sparse_bridge.tools.harness import results

SCHEMA = 1
CUT = 1 << 15  # rows of a part of an MLP
SHARES = (0.9, 0.75)
CAP = 1.1  # of the limit, for what the allocator reserves


class Level(NamedTuple):
    rows: int
    channels: int


LEVELS = {"97k x 1024": Level(97_000, 1024), "466k x 128": Level(466_000, 128)}
QUICK = {"1k x 32": Level(1_000, 32)}


def surface(rows: int, seed: int = 0) -> tuple[torch.Tensor, int]:
    """(coordinates int32 [rows, 4] of voxels near a sphere, the grid's extent)."""
    generator = torch.Generator().manual_seed(seed)
    extent = int((rows / 4) ** 0.5) + 8  # about twice the area, some voxels thick
    found = torch.empty((0, 3), dtype=torch.int64)
    while len(found) < rows:
        way = torch.randn((rows, 3), generator=generator, dtype=torch.float64)
        way /= way.norm(dim=1, keepdim=True)
        deep = torch.rand((rows, 1), generator=generator, dtype=torch.float64) * 3
        cells = ((way * (extent / 2 - 1 - deep)) + extent / 2).floor().long()
        found = torch.cat([found, cells]).unique(dim=0)
    found = found[torch.randperm(len(found), generator=generator)[:rows]]
    return torch.cat([torch.zeros(rows, 1, dtype=torch.int64), found], 1).int(), extent


class Block(nn.Module):
    """h + mlp(norm(conv(h))).  conv(x): through one of the APIs, features to features.  cut: rows
    that the MLP takes at a time, 0 for all."""

    def __init__(self, conv: Callable[..., torch.Tensor], channels: int, cut: int) -> None:
        super().__init__()
        self.conv, self.cut = conv, cut
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x))
        if not self.cut:
            return self.mlp(h).add_(x)
        for begin in range(0, len(h), self.cut):
            part = slice(begin, begin + self.cut)
            h[part] = self.mlp(h[part])
        return h.add_(x)


@contextmanager
def runner(
    api: str, level: Level, cut: int, device: str, dtype: torch.dtype, blocks: int
) -> Iterator[Callable[[], torch.Tensor]]:
    """run() of a level through one API, with new maps each time."""
    coords, extent = surface(level.rows)
    coords = coords.to(device)
    torch.manual_seed(0)
    c = level.channels
    x = torch.randn(level.rows, c, device=device, dtype=dtype)
    with sparse_bridge.enable(api, mode="standin"):
        prepare = {"flex_gemm": _flex_gemm, "spconv": _spconv}[api](level, extent, device, dtype)
        layers = [Block(lambda h: h, c, cut).to(device, dtype).eval() for _ in range(blocks)]

        @torch.no_grad()
        def run() -> torch.Tensor:
            convolve, h = prepare(coords.clone()), x
            for number, block in enumerate(layers):
                block.conv = lambda rows, number=number: convolve(number, rows)
                h = block(h)
            return h

        yield run


def _flex_gemm(level: Level, extent: int, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    from flex_gemm.ops.spconv import sparse_submanifold_conv3d

    c = level.channels
    weights = _weights(c, (c, 3, 3, 3, c), device, dtype)
    shape = torch.Size((1, c, extent, extent, extent))

    def prepare(coords: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
        caches: list[Any] = [None]

        def convolve(number: int, h: torch.Tensor) -> torch.Tensor:
            y, caches[0] = sparse_submanifold_conv3d(
                h, coords, shape, weights(number), None, caches[0]
            )
            return y

        return convolve

    return prepare


def _spconv(level: Level, extent: int, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    import spconv.pytorch as sp

    c, made = level.channels, {}
    weights = _weights(c, (c, 3, 3, 3, c), device, dtype)

    def layer(number: int) -> Any:
        if number not in made:
            made[number] = sp.SubMConv3d(c, c, 3, bias=False, indice_key="level")
            made[number].weight = nn.Parameter(weights(number), requires_grad=False)
        return made[number]

    def prepare(coords: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
        tensors: list[Any] = [None]

        def convolve(number: int, h: torch.Tensor) -> torch.Tensor:
            if tensors[0] is None:
                tensors[0] = sp.SparseConvTensor(h, coords, [extent] * 3, 1)
            tensors[0] = tensors[0].replace_feature(h)
            y: torch.Tensor = layer(number)(tensors[0]).features
            tensors[0] = tensors[0].replace_feature(h[:0])  # the tensor keeps maps, not features
            return y

        return convolve

    return prepare


def _weights(
    channels: int, shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> Callable[[int], torch.Tensor]:
    made: dict[int, torch.Tensor] = {}

    def weight(number: int) -> torch.Tensor:
        if number not in made:
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(shape, generator=generator) / (27 * channels) ** 0.5
            made[number] = values.to(device, dtype)
        return made[number]

    return weight


class Measured(NamedTuple):
    """ms: median of a run.  allocated, reserved: peaks, in MiB; None on a CPU."""

    ms: float
    allocated: float | None
    reserved: float | None
    result: torch.Tensor


def measure(run: Callable[[], torch.Tensor], device: str, rounds: int) -> Measured:
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
    peaks = None, None
    if gpu:
        peaks = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20
    return Measured(statistics.median(times), *peaks, y)


def runs_capped(run: Callable[[], torch.Tensor], limit: int) -> bool:
    """Whether a run passes under the limit with torch's allocator capped near it."""
    whole = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP * limit / whole))
    try:
        with sparse_bridge.memory_limit(limit):
            run()
        torch.cuda.synchronize()
    except (MemoryLimitError, torch.OutOfMemoryError):
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def least_of(run: Callable[[], torch.Tensor]) -> int:
    """The lowest limit under which a run passes: as errors tell it, step by step."""
    limit = 1
    while True:
        gc.collect()
        try:
            with sparse_bridge.memory_limit(limit):
                run()
            return limit
        except MemoryLimitError as error:
            limit = error.least


def compare(
    name: str, level: Level, api: str, cut: int, device: str, dtype: torch.dtype, rounds: int,
    blocks: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the table of one level through one API."""
    rows = []
    with runner(api, level, cut, device, dtype, blocks) as run:
        for _ in range(3):
            run()
        free = measure(run, device, rounds)
        limits: list[int | None] = [None]
        if free.allocated is not None:
            limits += [int(share * free.allocated * 2**20) for share in SHARES]
        limits.append(least_of(run))
        for limit in limits:
            row = {"level": name, "api": api, "cut": cut, "limit_mib": limit and limit / 2**20}
            try:
                with nullcontext() if limit is None else sparse_bridge.memory_limit(limit):
                    found = free if limit is None else measure(run, device, rounds)
                row |= found._asdict() | {"same_bits": torch.equal(found.result, free.result)}
                del row["result"]
            except MemoryLimitError as error:
                row["error"] = f"least: {error.least / 2**20:.1f} MiB"
            if limit is not None and device == "cuda":
                row["capped"] = runs_capped(run, limit)
            rows.append(row)
            print(shown(row), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    """A row of the table."""
    limit = "none" if row["limit_mib"] is None else f"{row['limit_mib']:.1f}"
    head = f"{row['level']:11} {row['api']:10} {'cut' if row['cut'] else 'whole':6} {limit:>9}"
    if "error" in row:
        return f"{head}  {row['error']}"
    peaks = (row["allocated"], row["reserved"])
    cells = " ".join("        -" if one is None else f"{one:9.1f}" for one in peaks)
    capped = {None: "", True: "  passes capped", False: "  not capped"}[row.get("capped")]
    bits = "same" if row["same_bits"] else "OTHER"
    return f"{head} {cells} {row['ms']:9.2f}  {bits}{capped}"


def main(given: list[str] | None = None) -> int:
    """Print a table and write JSON; 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("levels", nargs="*", help=f"of {', '.join(LEVELS)}")
    parser.add_argument("--api", nargs="+", default=["flex_gemm", "spconv"])
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
    print("level       api        MLP    limit MiB allocated  reserved        ms  bits")
    rows = []
    for name in args.levels or levels:
        for api in args.api:
            for cut in (0, CUT if not args.quick else 256):
                rows += compare(
                    name, levels[name], api, cut, device, dtype, args.rounds, args.blocks
                )
    if args.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        results.save(args.json, SCHEMA, {"device": name, "torch": torch.__version__, "rows": rows})
    return int(any(not row.get("same_bits", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
