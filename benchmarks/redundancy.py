"""Redundant and uneven work of the masked dataflow, counted on the CPU: `python -m
benchmarks.redundancy`.

Rows of multiply-adds that tiles do, over the rows that are needed, for a 3x3x3 submanifold map:
unsorted (0 mask splits: every offset for every row), sorted (1), and with 2 to 4 mask splits. The
order is the kernels' own, but for offsets' frequencies, which are exact here.

Then how long a launch lasts, in offsets that one program visits after another, if a GPU holds so
many programs: tiles by one each, the last ones first, and long tiles shared, as the balanced
dataflow has them.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence

import torch

from sparse_bridge.core import functional

from .workloads import VOXEL_SIZE, Scan, load

__all__ = ["counted", "lengths", "main", "present_in", "redundancy", "walked"]

TILES = (64, 128)  # rows
SPLITS = (0, 1, 2, 3, 4)
PROGRAMS = (264, 528, 924)  # of 132 compute units with 2, 4 and 7 each
LEAST = 6  # offsets of a tile that are not shared


def present_in(scan: Scan) -> torch.Tensor:
    """bool [27, N]: which offset reaches a row, of every row."""
    cmap = functional.coordinate_map(scan.coords, scan.shape, scan.batch_size)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
    return kmap.rulebook.table(0)[0].nbr >= 0


def _gray_rank(present: torch.Tensor) -> torch.Tensor:
    """int64 [N]: place of each row's mask in a Gray code, rarest offset most significant."""
    n_offsets = len(present)
    by_count = present.sum(1).argsort(stable=True)  # rarest first
    key = torch.zeros(present.shape[1], dtype=torch.int64)
    for rank, v in enumerate(by_count.tolist()):
        key |= present[v].long() << (n_offsets - 1 - rank)
    for shift in (16, 8, 4, 2, 1):
        key ^= key >> shift
    return key


def counted(present: torch.Tensor, splits: int, tile: int) -> int:
    """Rows that tiles of `tile` rows multiply, all offsets together."""
    n_offsets, n_rows = present.shape
    n_tiles = -(-n_rows // tile)
    if splits == 0:
        return n_offsets * n_tiles * tile
    total = 0
    for part in range(splits):
        inside = present[part * n_offsets // splits : (part + 1) * n_offsets // splits]
        ordered = inside[:, _gray_rank(inside).argsort(stable=True)]
        filled = torch.nn.functional.pad(ordered, (0, n_tiles * tile - n_rows))
        total += int(filled.view(len(inside), n_tiles, tile).any(2).sum()) * tile
    return total


def redundancy(present: torch.Tensor) -> dict[int, tuple[float, ...]]:
    """Mask splits -> redundancy under tiles of each of `TILES` rows."""
    pairs = int(present.sum())
    return {
        splits: tuple(counted(present, splits, tile) / pairs for tile in TILES) for splits in SPLITS
    }


def lengths(present: torch.Tensor, tile: int) -> list[int]:
    """How many offsets each tile of `tile` rows visits, in mask order."""
    n_offsets, n_rows = present.shape
    n_tiles = -(-n_rows // tile)
    ordered = present[:, _gray_rank(present).argsort(stable=True)]
    filled = torch.nn.functional.pad(ordered, (0, n_tiles * tile - n_rows))
    counts: list[int] = filled.view(n_offsets, n_tiles, tile).any(2).sum(0).tolist()
    return counts


def walked(tiles: Sequence[int], programs: int, shared: bool) -> int:
    """Offsets, one after another, until the last of `programs` places is through, which take pieces
    of work as they come: helpers' parts first, then tiles from the last on."""
    limit = max(LEAST, -(-sum(tiles) // programs)) if shared else max(tiles)
    helpers, first = [], []
    for length in reversed(tiles):
        parts = max(1, -(-length // limit))
        share = -(-length // parts)
        first.append(min(share, length))
        helpers += [min(share, length - part * share) for part in range(1, parts)]
    places = [0] * programs
    for work in helpers + first:
        heapq.heapreplace(places, places[0] + work)
    return max(places)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each scan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redundancy", description=__doc__)
    parser.add_argument("scans", nargs="*", default=["street"], help="as for `bench --scans`")
    parser.add_argument("--voxel-size", type=float, default=VOXEL_SIZE, metavar="M")
    args = parser.parse_args(arguments)
    for source in args.scans:
        present = present_in(load(source, 1, args.voxel_size, "cpu"))
        n_rows = present.shape[1]
        print(f"{source}: {n_rows} rows, {int(present.sum()) / n_rows:.2f} pairs a row")
        print("  splits  " + "  ".join(f"tiles of {tile}".rjust(11) for tile in TILES))
        for splits, found in redundancy(present).items():
            print(f"  {splits:6d}  " + "  ".join(f"{one:11.2f}" for one in found))
        tiles = lengths(present, TILES[0])
        mean = sum(tiles) / len(tiles)
        print(f"  {len(tiles)} tiles of {TILES[0]}: {mean:.1f} offsets each, {max(tiles)} at most")
        for programs in PROGRAMS:
            whole, shared = (walked(tiles, programs, one) for one in (False, True))
            print(f"  {programs:6d} programs: {whole} offsets in a row, shared {shared}")


if __name__ == "__main__":
    main()
