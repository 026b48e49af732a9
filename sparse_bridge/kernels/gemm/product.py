"""What kernels multiply, but for the map and the tile. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..runtime.target import Target


class Weights(Protocol):
    """How a weight lies in memory. c_in, c_out: channels **per group**. strides: (offset, input
    channel, output channel, group) in elements; shift: where offset 0 starts.  exchanged: input and
    output channels changed places (dgrad)."""

    @property
    def n_offsets(self) -> int:
        """The kernel volume."""

    @property
    def c_in(self) -> int:
        """Input channels of a group."""

    @property
    def c_out(self) -> int:
        """Output channels of a group."""

    @property
    def groups(self) -> int:
        """How many groups."""

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """In elements: offset, input channel, output channel, group."""

    @property
    def shift(self) -> int:
        """Elements before the matrix of offset 0."""

    @property
    def exchanged(self) -> bool:
        """Whether input and output channels changed places (dgrad)."""


class EpilogueForm(NamedTuple):
    """What follows the sum, but for the tensors.

    parts: of BIAS, NORM, AFFINE (with NORM only) and RESIDUAL, in the order in which they follow.
    alpha: slope of leaky_relu.  eps: of the norm.
    """

    parts: int = 0
    activation: str | None = None
    alpha: float = 0.0
    eps: float = 0.0


class Product(NamedTuple):
    """A product but for its map and tile.  precision: of fp32, "ieee", "tf32" or "tf32x3"; "half"
    where fp16 is also added up in fp16."""

    target: Target
    device: torch.device
    dtype: torch.dtype
    precision: str
    w: Weights
    epilogue: EpilogueForm = EpilogueForm()
