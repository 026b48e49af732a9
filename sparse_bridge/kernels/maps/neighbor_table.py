"""Neighbour tables: for every offset and output row the input row, or -1.

`nbr` is int32 `[V, N]`, offset-major. Beside it builders leave what the row order needs: `mask`
int32 `[W, N]`, bit v % 32 of word v // 32 = offset v present, W = ceil(V / 32). What reads and writes
them are the kernels of `neighbor_lookup` and `mask_kernels`. This module does without Triton, for maps made by torch.
"""

from __future__ import annotations

import torch

from ..runtime.parts import Operand, Slab, memory_of, viewed
from ..runtime.target import Target

OFFSETS = 32  # offsets per program: one mask word
ROWS = 128  # of a table of which a program makes the masks
OPTIONS = {"num_warps": 4}


class NeighborTable:
    """nbr int32 [V, N] and mask int32 [W, N] as described above (None until somebody asks for it).

    count: int32 [1] on the device, one less than the rows in use. None if all are.  blank: the columns
    behind them are -1; otherwise they mean nothing.

    own: (nbr, mask, count) for launches.
    """

    tiled = False  # unlike a `TileList`

    def __init__(
        self, nbr: Operand, mask: Operand | None = None, count: Operand | None = None, blank: bool = False
    ) -> None:
        self.own, self.blank = (nbr, mask, count), blank
        self.n_offsets, self.n_rows = nbr.shape
        self._parted: dict[int, torch.Tensor] = {}

    @property
    def nbr(self) -> torch.Tensor:
        """int32 [V, N]: the row that is met, -1 where there is none."""
        return viewed(self.own[0])  # type: ignore[no-any-return]

    @property
    def mask(self) -> torch.Tensor | None:
        """int32 [W, N]; None where nobody has asked for masks, see `masks`."""
        return viewed(self.own[1])  # type: ignore[no-any-return]

    @property
    def count(self) -> torch.Tensor | None:
        """int32 [1] on the device: rows in use, less one. None if all are."""
        return viewed(self.own[2])  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return memory_of(self.own[0]).device

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What holds the table: nbr int32 [V, N], `count` int32 [1] if it has one, and the memory of masks that were
        made, which tiles are packed from later."""
        masks = [memory_of(masks) for masks in (self.own[1], *self._parted.values()) if masks is not None]
        return (self.nbr, *masks) if self.count is None else (self.nbr, self.count, *masks)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of all masks that were made."""
        tensors = [*map(viewed, self.own[:2]), *map(viewed, self._parted.values())]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def masks(self, target: Target, parts: int = 1) -> torch.Tensor:
        """The offset masks, int32 [parts * W, N], made and kept if nobody left them.

        parts: of so many ranges of the offsets, each with as many words, W, as the longest of them.
        """
        from .mask_kernels import masks_kernel

        nbr, mask, count = self.own
        masks = mask if parts == 1 else self._parted.get(parts)
        if masks is not None:
            return viewed(masks)  # type: ignore[no-any-return]
        n_offsets, n_rows = nbr.shape
        blocks, words, _ = grid_of(n_rows, -(-n_offsets // parts))
        masks = torch.empty((parts * words, n_rows), dtype=torch.int32, device=self.device)
        masks_kernel.launch(
            self.device,
            target,
            (blocks, words, parts),
            (nbr, masks, n_rows, n_offsets),
            (ROWS,),
            OPTIONS,
            nbr.data_ptr() % 16,
        )
        if parts == 1:
            self.own = nbr, masks, count
        else:
            self._parted[parts] = masks
        return masks

    def copy(self) -> NeighborTable:
        """The same table in the same memory, without masks that are made of either one later."""
        return NeighborTable(*self.own, self.blank)

    def used(self, n_rows: int) -> NeighborTable:
        """The table of its first `n_rows` rows, those in use."""
        if n_rows == self.n_rows and self.blank:
            return NeighborTable(*self.own[:2])
        nbr, mask, count = self.nbr, self.mask, self.count
        if n_rows == self.n_rows:
            if count is not None:
                nbr.masked_fill_(torch.arange(n_rows, device=nbr.device) > count, -1)
            return NeighborTable(nbr, mask)
        mask = None if mask is None else mask[:, :n_rows].contiguous()
        return NeighborTable(nbr[:, :n_rows].contiguous(), mask)


def table_elements(n_rows: int, n_offsets: int) -> int:
    """Elements of a `Slab` that a table with masks takes."""
    return Slab.rounded(n_offsets * n_rows) + Slab.rounded(-(-n_offsets // OFFSETS) * n_rows)


def grid_of(n_rows: int, n_offsets: int) -> tuple[int, int, int]:
    """The launch grid of a kernel whose programs take `ROWS` rows and `OFFSETS` offsets."""
    return -(-n_rows // ROWS), -(-n_offsets // OFFSETS), 1
