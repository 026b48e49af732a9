"""A tile: the knobs of one GEMM launch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..runtime.target import Target

# Rows are found in three loads, one after another: the offset's number, the numbers of its rows,
# the rows. Triton (3.5 and newer) shares the stages among them: seven keep the rows of two steps
# under way, ten those of three. Up to four there is one buffer less than stages.
DEEPEST, ROWS_OF_TWO, ROWS_OF_THREE = 4, 7, 10


class GemmSize(NamedTuple):
    """What a gather-GEMM's tile depends on of its map and weight.

    n_rows: of the result.  c_in, c_out: channels per group.  n_offsets: kernel volume.  expanding: the result has more
    rows than x, as of transposed and inverse layers.
    """

    n_rows: int
    c_in: int
    c_out: int
    n_offsets: int
    expanding: bool = False


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """block_m x block_n results per program, reduced block_k at a time.

    For the gather-GEMM block_m counts rows; for wgrad it counts input channels and block_k pairs.
    vendor: compile options of some backends.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    vendor: tuple[tuple[str, int], ...] = ()

    def options(self, target: Target) -> dict[str, Any]:
        """Compile options for `target`."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options.update(option for option in self.vendor if option[0] in target.generation.options)
        return options

    def over_table(self) -> TileConfig:
        """For products that visit every offset: there a row is found in two loads, and a thread
        keeps which rows there are, besides its results."""
        if self.num_stages <= DEEPEST:
            return self
        stages = {ROWS_OF_TWO: 5, ROWS_OF_THREE: ROWS_OF_TWO}.get(self.num_stages, DEEPEST)
        warps = 8 if self.block_m * self.block_n >= 128 * 128 else self.num_warps
        return dataclasses.replace(self, num_stages=stages, num_warps=warps)

    def shared_bytes(self, element_size: int) -> int:
        """Upper estimate of the shared memory the operands of one program need."""
        buffers = max(1, self.num_stages - 1)
        if self.num_stages > DEEPEST:
            buffers = (self.num_stages - 1) // 3 + 1
        return (self.block_m + self.block_n) * self.block_k * element_size * buffers


def power(value: int, low: int, high: int) -> int:
    """Smallest power of two that holds `value`, between low and high."""
    return min(high, max(low, 1 << (max(1, value) - 1).bit_length()))
