"""Redundant work of the masked dataflow, counted on the CPU: `python -m benchmarks.redundancy`.

Rows of multiply-adds that tiles do, over the rows that are needed, for a 3x3x3 submanifold map:
unsorted (0 mask splits: every offset for every row), sorted (1), and with 2 to 4 mask splits. The
order is the kernels' own, but for offsets' frequencies, which are exact here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from sparse_bridge.core import functional
from sparse_bridge.kernels.maps.gray_rank import KEY_BITS

from .workloads import VOXEL_SIZE, Scan, load

__all__ = ["counted", "main", "present_in", "redundancy"]

TILES = (64, 128)  # rows
SPLITS = (0, 1, 2, 3, 4)


def present_in(scan: Scan) -> torch.Tensor:
    """bool [27, N]: which offset reaches a row, of every row."""
    cmap = functional.coordinate_map(scan.coords, scan.shape, scan.batch_size)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
    return kmap.rulebook.table(0)[0].nbr >= 0


def _gray_rank(present: torch.Tensor) -> torch.Tensor:
    """int64 [N]: place of each row in the kernels' Gray code (`kernels.maps.gray_rank`)."""
    n_offsets, n_rows = present.shape
    bits = list(_sides(present)) if n_offsets == 27 else []
    telling = sorted((one for one in present if not one.all()), key=lambda one: int(one.sum()))
    room = min(KEY_BITS - len(bits), len(telling))
    shared = [torch.zeros(n_rows, dtype=torch.bool) for _ in range(room)]
    for rank, one in enumerate(telling):  # rarest first
        shared[max(rank // 2, rank - (len(telling) - room))] |= one
    key = torch.zeros(n_rows, dtype=torch.int64)
    for bit in [*bits, *shared]:
        key = 2 * key + (bit.long() ^ (key & 1))
    return key


def _sides(present: torch.Tensor) -> Iterator[torch.Tensor]:
    at = torch.cartesian_prod(*[torch.arange(3)] * 3)
    for axis in (2, 1, 0):
        yield present[at[:, axis] == 0].any(0)
        yield present[at[:, axis] == 2].any(0)


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
    return {splits: tuple(counted(present, splits, tile) / pairs for tile in TILES) for splits in SPLITS}


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


if __name__ == "__main__":
    main()
