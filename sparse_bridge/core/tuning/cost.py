"""A cost model of the two GEMM kernels: which tiles are worth timing.

Costs are in bytes of the device's memory traffic, so only a few ratios are needed, and only their
order counts. A launch takes the longest of its products, its memory traffic and its traffic out of
the cache, stretched by how unevenly its programs fill the compute units, plus the latency of the
steps that each program takes one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .problem import Problem

if TYPE_CHECKING:
    from ...kernels.tiles.tile import TileConfig

_CACHE = 2.5  # bytes out of the cache per byte of memory traffic
_STEP = 0.25e-6  # seconds one step of a program waits for its operands
_LAUNCH = 3e-6  # seconds of one more kernel
_PER_UNIT = 30e9  # bytes a second of memory traffic per compute unit
_REGISTERS = 256 << 10  # bytes per compute unit
_MOST_THREADS = 1536  # per compute unit, where its record does not say


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def predicted(problem: Problem, tile: TileConfig, live: Callable[[int], int]) -> float:
    """Cost of `tile`, comparable between tiles of one problem.

    live: block_m -> (row tile, offset) blocks that a gather-GEMM of such tiles visits.
    """
    return _wgrad(problem, tile) if problem.direction == "wgrad" else _gather(problem, tile, live)


def _gather(problem: Problem, tile: TileConfig, live: Callable[[int], int]) -> float:
    size, groups = problem.dtype.itemsize, problem.groups
    tiles, columns = _cdiv(problem.n_rows, tile.block_m), _cdiv(problem.c_out, tile.block_n)
    depth, partials = _cdiv(problem.c_in, tile.block_k), problem.splits
    programs = tiles * columns * groups * partials
    steps = live(tile.block_m) * columns * groups * depth
    results = problem.n_rows * problem.c_out * groups
    memory = problem.n_in * problem.c_in * groups * size + results * size
    weight = problem.n_offsets * problem.c_in * problem.c_out * groups * size
    if partials == 1:
        return _launch(problem, tile, programs, steps, memory + weight)
    sums = partials * results * 4  # written beside the products, read by a kernel of their own
    cost = _launch(problem, tile, programs, steps, memory + sums + weight)
    return cost + sums + _bandwidth(problem) * _LAUNCH


def _wgrad(problem: Problem, tile: TileConfig) -> float:
    from ...kernels.tiles.tile_config import wgrad_shares

    size, groups = problem.dtype.itemsize, problem.groups
    blocks = _cdiv(problem.c_in, tile.block_m) * _cdiv(problem.c_out, tile.block_n) * groups
    steps = (_cdiv(problem.work, tile.block_k) + problem.n_offsets) * blocks
    sizes = (problem.n_offsets, problem.c_in, problem.c_out)
    shares = wgrad_shares(
        problem.target,
        tile,
        problem.dtype,
        problem.precision,
        sizes,
        groups,
        problem.work,
        min(problem.n_in, problem.n_rows),
    )
    results = problem.c_in * problem.c_out * groups * 4
    partials = (2 * (shares + problem.n_offsets) if shares else problem.n_offsets) * results
    rows = problem.n_in * problem.c_in + problem.n_rows * problem.c_out
    programs = blocks * (shares or problem.n_offsets)
    cost = _launch(problem, tile, programs, steps, rows * groups * size + partials)
    return cost + (_bandwidth(problem) * _LAUNCH if shares else 0.0)


def _bandwidth(problem: Problem) -> float:
    return _PER_UNIT * problem.target.compute_units


def _launch(problem: Problem, tile: TileConfig, programs: int, steps: int, memory: float) -> float:
    from ...kernels.tiles.tile_config import INTENSITY

    size, units = problem.dtype.itemsize, problem.target.compute_units
    half = problem.dtype in (torch.float16, torch.bfloat16)
    intensity = INTENSITY["half" if half else problem.precision]
    products = 2 * steps * tile.block_m * tile.block_n * tile.block_k / intensity
    traffic = steps * (tile.block_m + tile.block_n) * tile.block_k * size / _CACHE
    resident = _resident(problem, tile)
    used = min(programs, units * resident)
    # The last wave leaves units idle; few programs leave most of them idle.
    waves = _cdiv(programs, units * resident)
    stretch = max(waves * units * resident / max(programs, 1) if waves > 1 else 1.0, 1.0)
    stretch *= max(1.0, units / max(used, 1))
    serial = _STEP * steps / max(used, 1) / max(1, tile.num_stages - 1)
    return max(products, traffic, memory) * min(stretch, float(units)) + (serial * _bandwidth(problem))


def _resident(problem: Problem, tile: TileConfig) -> int:
    """Programs that one compute unit holds at a time."""
    target = problem.target
    chip = target.generation.chip(target.arch)
    memory, threads = chip.unit_shared << 10, chip.unit_threads
    shared = (memory or target.shared_memory) // max(1, tile.shared_bytes(problem.dtype.itemsize))
    registers = _REGISTERS // (tile.block_m * tile.block_n * 4 * 2)
    warps = (threads or _MOST_THREADS) // (tile.num_warps * target.warp_size)
    return max(1, min(shared, registers, warps))


def shortlist(problem: Problem, live: Callable[[int], int], count: int) -> list[TileConfig]:
    """The default tile and the `count` - 1 most promising others, best first."""
    live = functools.cache(live)
    default, *others = problem.candidates()
    others.sort(key=lambda tile: predicted(problem, tile, live))
    return [default, *others[: count - 1]]
