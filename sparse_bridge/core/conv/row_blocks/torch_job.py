"""The per-offset dataflow under a limit: its blocks of rows, cut smaller, each with copies of the
rows of x that it reads, in the dtype of its products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...geometry.host_cells import on_host
from ...maps.kernel_map import KernelMap
from ..chunks import Block, Chunks, Pairs, Part, cached, cut, n_blocks_of, pairs_of
from ..dataflow import Gather, LayerProduct
from ..dataflows.per_offset import TOGETHER, accumulator, on_cpu, sums_of
from .job import Call, Job

_PART = 1 << 18  # pairs whose products are computed at once, at most


class TorchJob(Job):
    """On the CPU, and in fp64. Other sums on GPUs without kernels follow the number of pairs."""

    def __init__(self, product: LayerProduct, inner: Gather, call: Call) -> None:
        super().__init__(product, inner, call)
        x, rulebook = call.x, call.rulebook
        self._work = accumulator(x) if on_cpu(x) else x.dtype
        self.divisible = on_cpu(x) or x.dtype == torch.float64
        kmap = KernelMap(rulebook, bool(call.side))
        self._turned = rulebook.symmetric and kmap.flipped  # as in `chunks_of`
        self._kmap = kmap.transposed() if self._turned else kmap

    def one_piece(self) -> int:
        call, w, lists = self.call, self.product.w, self.call.rulebook.lists()
        n_pairs = lists.starts[-1] * (2 if lists.mirrored else 1)
        n_bytes = 0 if cached(self._kmap, max(w.c_in, w.c_out)) else 16 * n_pairs
        cast = call.x.dtype != self._work
        sums = (call.x.numel() + call.n_rows * self.columns) * self._work.itemsize if cast else 0
        n_blocks = n_blocks_of(self._kmap, max(w.c_in, w.c_out))
        height = -(-call.n_rows // n_blocks)
        uneven = min(n_pairs, 2 * n_pairs // n_blocks, height * w.n_offsets)
        # A block's sums, and those of its dense offset.
        block = self._products(uneven, height) + 2 * height * self.columns * self._work.itemsize
        return n_bytes + sums + block + self._end(call.n_rows) + self._weight()

    def _weight(self) -> int:
        weight = self.call.weight
        return 0 if weight.dtype == self._work else weight.numel() * self._work.itemsize

    def _products(self, n_pairs: int, height: int) -> int:
        """Of the products of a block, and of rows that are gathered for them: all of a part while
        they are few, else those of one offset."""
        w, at_once = self.product.w, min(n_pairs, _PART)
        rows = max(min(at_once * w.c_in, TOGETHER), min(height, at_once) * w.c_in)
        return (at_once * w.c_out + rows) * self._work.itemsize

    def _end(self, n_rows: int) -> int:
        return self.end_bytes(n_rows, self.call.end.norm is not None)

    def growth(self) -> int:
        rulebook = self.call.rulebook
        return -sum(getattr(value, "nbytes", 0) for value in rulebook.cache.values())

    def prepare(self) -> None:
        self.call.rulebook.cache.drop()

    @functools.cached_property
    def _pairs(self) -> Pairs:
        pairs = pairs_of(self._kmap)
        if isinstance(pairs.x_rows, np.ndarray):
            return pairs
        return pairs._replace(x_rows=on_host(pairs.x_rows), y_rows=on_host(pairs.y_rows))

    @functools.cached_property
    def _pairs_up_to(self) -> Any:
        """Pairs up to each row, int [N_out]."""
        return np.bincount(self._pairs.y_rows, minlength=self.call.n_rows).cumsum()

    def block(self, height: int) -> int:
        n_rows, n_in = self.call.n_rows, self.call.x.shape[0]
        counts = self._pairs_up_to[[*range(height - 1, n_rows - 1, height), n_rows - 1]]
        n_pairs = int(np.diff(counts, prepend=0).max())
        dense = min(height, n_rows) if self._pairs.dense >= 0 else 0
        others, size = min(n_pairs, n_in), self._work.itemsize
        rows = (dense + others) * size + (others * self.size if size != self.size else 0)
        sums = min(height, n_rows) * self.columns * (2 * size + self.size)
        lists = 24 * n_pairs  # where the pairs lie in the block, and their products
        cut_lists = 8 * len(self._pairs.x_rows)  # of all blocks
        products, end = self._products(n_pairs, height), self._end(min(height, n_rows))
        copies = rows * self.product.w.columns_in + self._weight()
        return copies + sums + lists + cut_lists + products + end

    def fill(self, y: torch.Tensor, height: int) -> None:
        """Write y [N_out, C_out], x's dtype, block by block. Products and sums are fp32, fp64 for fp64."""
        stacks = self.product.w.stacks(self.call.weight, self._work)
        chunks = cut(self._kmap, height, self._pairs)
        for block in chunks.blocks:
            self._fill(y[block.begin : block.end], block, chunks, stacks)

    def _fill(self, y: torch.Tensor, block: Block, chunks: Chunks, stacks: list[torch.Tensor]) -> None:
        """One block; what it needs goes with the call, before the next one's is made."""
        own, rows = _apart(block, chunks, self.call.x, self._work)
        own = own.backwards() if self._turned else own
        sums = sums_of(own, len(y), rows, stacks, self.product.w)
        y.copy_(self.call.end_of(block.begin, block.end).finish(sums, y.dtype))


def _apart(block: Block, chunks: Chunks, x: torch.Tensor, dtype: torch.dtype) -> tuple[Chunks, torch.Tensor]:
    """(chunks of one block that begins at row 0, the rows of x that it speaks of)."""
    begin, n_rows = block.begin, block.end - block.begin
    lists = [on_host(part.x_rows) for part in block.parts]
    others = np.unique(np.concatenate(lists)) if lists else np.empty(0, np.int32)
    n_own = n_rows if chunks.dense >= 0 else 0
    if n_own:  # those come first, where the dense offset looks for them
        others = others[(others < begin) | (others >= block.end)]
    rows = x.new_empty((n_own + len(others), x.shape[1]), dtype=dtype)
    rows[:n_own] = x[begin : begin + n_own]
    rows[n_own:] = x.index_select(0, torch.from_numpy(others).to(x.device))

    def local(x_rows: Any) -> Any:
        behind = (n_own + np.searchsorted(others, x_rows)).astype(np.int32)
        if not n_own:
            return behind
        return np.where((x_rows >= begin) & (x_rows < block.end), x_rows - begin, behind)

    parts = tuple(_moved(part, local(x_rows), begin, x.device) for part, x_rows in zip(block.parts, lists, strict=True))
    all_rows = Block(0, n_rows, parts)
    longest = max((max(part.sizes) for part in parts), default=0)
    products = max((part.n_pairs for part in parts), default=0)
    return Chunks((all_rows,), chunks.reverse, chunks.dense, longest, products), rows


def _moved(part: Part, x_rows: Any, begin: int, device: torch.device) -> Part:
    pieces: Sequence[tuple[int, int]] = list(zip(part.offsets, part.sizes, strict=True))
    rows = (part.rows - begin).to(device)
    return Part(pieces, torch.from_numpy(x_rows).to(device), rows, 0, part.n_rows, part.behind)
