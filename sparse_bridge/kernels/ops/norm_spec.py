"""A batch norm in training, but for its rows: worked out once for many calls."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..runtime.launch import cdiv, number_of, specialise
from ..runtime.target import Target

TILE = 8192  # values of a step
PARTS = 128
PROGRAMS = 1  # of a compute unit

# Gain, beta, running mean and variance [C], and the number of batches; None: not there.
Vectors = tuple[torch.Tensor | None, ...]
# dx [N, C], and of gain and beta [C]; None: not there.
Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def tile_of(channels: int, even: bool) -> tuple[int, int]:
    """(rows, channels) of a step.  even: rows start at multiples of 16 bytes; others are read value
    by value, each with an address of its own in registers."""
    return (TILE if even else TILE // 2) // channels, channels


class Cut(NamedTuple):
    """How rows and channels are dealt out.

    programs: of the second launch, by rows.  blocks: of channels.  tile: see `tile_of`.
    """

    parts: int
    programs: int
    blocks: int
    tile: tuple[int, int]


@functools.lru_cache(maxsize=1024)  # both passes of all layers of a scene ask
def cut_of(n_rows: int, n_channels: int, aligned: bool, compute_units: int) -> Cut:
    """The cut of x [n_rows, n_channels].  aligned: to 16 bytes, every tensor of rows."""
    channels = 16 if n_channels <= 16 else 32
    tile = tile_of(channels, aligned and n_channels % 16 == 0)
    blocks = cdiv(n_channels, channels)
    programs = max(1, min(cdiv(n_rows, tile[0]), PROGRAMS * compute_units // blocks))
    return Cut(min(programs, PARTS), programs, blocks, tile)


class NormSpec:
    """Features and vectors of one kind.

    units: compute units of the target.  present: whether there are a gain, a beta, running statistics and a number of
    batches, as numbers.  rows_key, vectors_key, grads_key: numbers for all that a compiled kernel depends on here: one
    that reads rows alone, the forward and the backward pass.
    """

    __slots__ = ("device", "grads_key", "present", "rows_key", "target", "units", "vectors_key")

    def __init__(
        self,
        target: Target,
        device: torch.device,
        dtype: torch.dtype,
        n_channels: int,
        dtypes: tuple[torch.dtype | None, ...],
    ) -> None:
        self.target, self.device, self.units = target, device, target.compute_units
        gain, beta, mean, _, batches = dtypes
        self.present = tuple([0 if vector_dtype is None else 1 for vector_dtype in (gain, beta, mean, batches)])
        rows = "norm", dtype, specialise(n_channels)
        self.rows_key = number_of(rows)
        self.vectors_key = number_of((*rows, *dtypes))
        self.grads_key = number_of((*rows, *dtypes[:2]))


_cached_spec = functools.lru_cache(maxsize=1024)(NormSpec)


def spec_of(x: torch.Tensor, vectors: Vectors, target: Target) -> NormSpec:
    """The norm of features like x [N, C], fp16 / bf16 / fp32, with vectors like these [C]: of x's dtype or fp32, and
    an int64 number of batches. One object for equal kinds."""
    dtypes = tuple([None if vector is None else vector.dtype for vector in vectors])
    return _cached_spec(target, x.device, x.dtype, x.shape[1], dtypes)
