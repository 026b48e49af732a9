"""examples/train_ddp.py over streets of which some have no voxels.

python -m torch.distributed.run --nproc-per-node 2 -m tests.examples.empty_streets OPTIONS
"""

from __future__ import annotations

import sys

import torch

from .launch import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import train_ddp

FIRST_FULL = 6  # of the eight streets that the tests train on; the first held-out one is empty, too


def no_voxels() -> tuple[torch.Tensor, ...]:
    return torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.long)


def main() -> None:
    of_street = train_ddp.Streets.__getitem__

    def item(self, key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        seed = key[0]
        return no_voxels() if seed < FIRST_FULL or seed == train_ddp.HELD_OUT else of_street(self, key)

    train_ddp.Streets.__getitem__ = item
    train_ddp.main()


if __name__ == "__main__":
    main()
