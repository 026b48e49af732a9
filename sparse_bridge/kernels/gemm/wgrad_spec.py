"""What plans of wgrad for many scenes have in common, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.launch import cdiv, power_of_2, specialise
from ..runtime.target import Target
from ..tiles.tile_config import TileConfig

__all__ = ["SUM_BLOCKS", "SUM_LOADS", "WgradSpec", "sum_shape"]

_KEYS: dict[Any, int] = {}  # a small number for what a plan fixes: cheap to hash in every launch
SUM_BLOCKS = (64, 128, 256, 512, 1024)  # results per program that adds partials
SUM_LOADS = 4096  # partial results that such a program loads at a time


def sum_shape(results: int, n_offsets: int, compute_units: int) -> tuple[int, int]:
    """(shares that a program adds at a time, results of it): few programs, since each first finds
    the shares of its offset, but enough to draw on the whole memory."""
    wanted = results * n_offsets // (16 * compute_units)
    block = next((block for block in SUM_BLOCKS if block >= wanted), SUM_BLOCKS[-1])
    return SUM_LOADS // block, block


class _Form(NamedTuple):
    """What of a problem does not depend on its map, once it is known who shares it.

    before, after: the kernel's numbers before and after the row strides.  The others are of the
    kernel that adds the shares up.
    """

    constants: tuple[Any, ...]
    options: dict[str, Any]
    key: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    sum_grid: tuple[int, int, int]
    sum_constants: tuple[Any, ...]
    sum_sizes: tuple[int, ...]
    sum_key: int


class WgradSpec:
    """A problem but for its map: what plans for many scenes have in common. See `WgradGemm`."""

    def __init__(
        self, target: Target, device: torch.device, dtype: torch.dtype, n_offsets: int, c_in: int,
        c_out: int, groups: int, dw_strides: tuple[int, int, int, int], dw_shift: int,
        precision: str, tile: TileConfig,
    ) -> None:  # fmt: skip
        self.target, self.device, self.dtype, self.tile = target, device, dtype, tile
        self.n_offsets, self.groups, self.precision = n_offsets, groups, precision
        self.taps = (n_offsets, c_in, c_out)
        self.rows = self.columns_in, self.columns = groups * c_in, groups * c_out
        self.row_kinds = specialise(*self.rows)
        self.blocks = cdiv(c_in, tile.block_m) * cdiv(c_out, tile.block_n)
        self.dw_place, self.quads = (dw_shift, *dw_strides), cdiv(c_in * self.columns, 4)
        self.addressed = target.takes_addresses
        self._forms: dict[tuple[bool, bool, bool], _Form] = {}

    def form(self, mirrored: bool, direct: bool, wide: bool) -> _Form:
        """The kernels' form. wide: offsets need 64 bits."""
        key = (mirrored, direct, wide)
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = self._form(*key)
        return found

    def _form(self, mirrored: bool, direct: bool, wide: bool) -> _Form:
        (n_offsets, c_in, c_out), tile = self.taps, self.tile
        even = c_in % tile.block_m == 0 and c_out % tile.block_n == 0
        v_block = max(16, power_of_2(n_offsets))
        precision = self.precision if self.dtype == torch.float32 else "ieee"
        constants = (
            mirrored, direct, precision, even, wide, v_block, tile.block_m, tile.block_n,
            tile.block_k
        )  # fmt: skip
        place = self.dw_place if direct else (0, 4 * self.quads, 1, c_in, c_in * c_out)
        key = (self.dtype, constants, tile, specialise(c_in, c_out, *place))
        size = c_in * self.columns
        shape = sum_shape(size, n_offsets, self.target.compute_units)
        sum_constants = (mirrored, v_block, *shape)
        return _Form(
            constants, tile.options(self.target), _KEYS.setdefault(key, len(_KEYS)),
            (n_offsets, c_in, c_out, place[0]), place[1:],
            (cdiv(size, shape[1]), n_offsets, 1), sum_constants,
            (n_offsets, c_in, c_out, self.columns, self.quads),
            _KEYS.setdefault(("sum", sum_constants, specialise(*self.dw_place)), len(_KEYS)),
        )  # fmt: skip
