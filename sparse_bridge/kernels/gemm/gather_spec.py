"""What plans of the gather-GEMM for many scenes have in common, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.launch import specialise
from ..runtime.target import Target
from ..tiles.tile_config import TileConfig, clamp_for_problem

__all__ = ["ACTIVATIONS", "Form", "GemmSpec"]

ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2, "sigmoid": 3}
_NO_SPLIT = specialise(0)[0]
_KEYS: dict[Any, int] = {}  # a small number for what a plan fixes: cheap to hash in every launch


class Form(NamedTuple):
    """What of a problem does not depend on its map, once it is known how large that is.

    numbers: c_in, c_out, where the weight starts, alpha and eps.  following: those, the row strides
    of contiguous features and results, and the weight's strides, in the kernel's order.
    """

    tile: TileConfig
    constants: tuple[Any, ...]
    options: dict[str, Any]
    numbers: tuple[Any, ...]
    key: int
    following: tuple[Any, ...]


class GemmSpec:
    """A problem but for its map: what plans for many scenes have in common.

    c_in, c_out: channels **per group**. w_strides: (offset, input channel, output channel, group)
    strides in elements; w_shift: where offset 0 starts. precision: of fp32, "ieee", "tf32" or
    "tf32x3".  tail: what follows the sum, 1: a bias, + 2: a norm's mean and variance (and eps),
    + 4: its gain and beta, + 8: a residual.
    """

    def __init__(
        self, target: Target, device: torch.device, dtype: torch.dtype, c_in: int, c_out: int,
        groups: int, w_strides: tuple[int, int, int, int], w_shift: int, tail: int,
        activation: str | None, alpha: float, precision: str, tile: TileConfig, eps: float = 0.0,
    ) -> None:  # fmt: skip
        self.target, self.device, self.dtype, self.tile = target, device, dtype, tile
        self.c_in, self.c_out, self.groups, self.columns = c_in, c_out, groups, groups * c_out
        self.w_strides, self.w_shift, self.tail = w_strides, w_shift, int(tail)
        self.activation, self.alpha, self.eps = activation, alpha, eps
        self.precision = precision
        # What every plan and launch asks for.
        self.columns_in, self.addressed = groups * c_in, target.takes_addresses
        self.row_kind = specialise(self.columns_in)
        self._forms: dict[Any, Form] = {}

    def form(self, packed: bool, wide: bool, split_stride: int) -> Form:
        """The kernel's form. wide: offsets need 64 bits."""
        split_kind = specialise(split_stride)[0] if split_stride else _NO_SPLIT
        key = (packed, wide, split_kind)
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = self._form(packed, wide, split_kind)
        return found

    def _form(self, packed: bool, wide: bool, split_kind: int) -> Form:
        c_in, c_out, single = self.c_in, self.c_out, self.dtype == torch.float32
        tile = clamp_for_problem(
            self.tile, self.target, self.dtype, self.precision, c_in, wide, self.tail
        )  # fmt: skip
        split, act = tile.split_k, ACTIVATIONS[self.activation]
        constants = (
            packed, self.tail if split == 1 else 0, act if split == 1 else 0,
            self.precision if single else "ieee", c_in % tile.block_k == 0,
            c_in <= tile.block_k, wide, split, tile.block_m, tile.block_n, tile.block_k,
        )  # fmt: skip
        kinds = specialise(c_in, c_out, self.w_shift, *self.w_strides, self.columns)
        key = (self.dtype, constants, tile, kinds, split_kind)
        # The type of a float is part of the signature.
        numbers = (c_in, c_out, self.w_shift, float(self.alpha), float(self.eps))
        options = tile.options(self.target)
        following = (*numbers, self.columns_in, self.columns, *self.w_strides)
        return Form(tile, constants, options, numbers, _KEYS.setdefault(key, len(_KEYS)), following)
