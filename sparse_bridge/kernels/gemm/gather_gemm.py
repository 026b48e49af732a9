"""Launching gather-GEMMs: products over one map, whose kernels are in `gather_kernels`."""

from __future__ import annotations

from typing import Any, cast

import torch

from ...errors import KernelError
from ..maps.tile_list import TileList
from ..runtime.launch import alignment_at, begin, number_of, specialise
from ..runtime.triton_compat import Entry
from ..tiles.tile import TileConfig
from .gather_kernels import gather_gemm_kernel, sum_partials_kernel
from .gather_spec import GemmSpec
from .vectors import NO_VECTORS, Vectors, tensors_of


def _read(vectors: Vectors, y_at: int) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """(addresses of `tensors_of`, what of them the kernel is compiled for)."""
    bias, mean, var, gain, beta, residual = vectors
    bias_dtype = mean_dtype = var_dtype = gain_dtype = beta_dtype = residual_dtype = None
    p = q = r = s = t = u = y_at
    if bias is not None:
        p, bias_dtype = bias.data_ptr(), bias.dtype
    if mean is not None and var is not None:
        q, r, mean_dtype, var_dtype = mean.data_ptr(), var.data_ptr(), mean.dtype, var.dtype
    if gain is not None and beta is not None:
        s, t, gain_dtype, beta_dtype = gain.data_ptr(), beta.data_ptr(), gain.dtype, beta.dtype
    if residual is not None:
        u, residual_dtype = residual.data_ptr(), residual.dtype
    at = (p, q, r, s, t, u)
    aligned = alignment_at(*at) if (p | q | r | s | t | u) & 15 else True
    operand_key = (aligned, bias_dtype, mean_dtype, var_dtype, gain_dtype, beta_dtype, residual_dtype)
    return at, operand_key


class GatherGemm:
    """A product over one map: everything but the tensors' addresses is fixed, so `__call__` only
    launches.

    table: `TileList` (packed) or nbr [V, N] int32 (plain), rows side by side.  n_rows: rows of y;
    n_in: of x.  blank: rows that no tile names are to be what an empty sum makes them.
    """

    # _numbers: what follows the tensors in a launch; where _addressed, the table's parts first.
    __slots__ = (
        "_addressed",
        "_key",
        "_lists",
        "_n_values",
        "_numbers",
        "_sum_grid",
        "blank",
        "grid",
        "native",
        "spec",
        "table",
    )

    kernel = gather_gemm_kernel

    def __init__(self, spec: GemmSpec, table: TileList | torch.Tensor, n_rows: int, n_in: int) -> None:
        if isinstance(table, TileList):
            n_offsets, pitch = table.n_offsets, table.pitch
        else:
            n_offsets, pitch = table.shape[0], table.stride(0)
        self.spec = spec = spec.fitting(n_offsets, pitch, n_rows, n_in)
        self.table, self.blank, tile = table, False, spec.tile
        self.native: object = None  # the launch as the compiled helper repeats it
        self._key = spec.key
        tiles = -(-n_rows // tile.block_m)
        if spec.splits > 1:
            tiles = spec.splits * pitch // tile.block_m
        programs = tiles * -(-spec.c_out // tile.block_n)
        if programs >= 1 << 31:
            raise KernelError(
                f"gather-GEMM over {n_rows} rows needs {programs} programs; a launch takes fewer than 2^31."
            )
        self.grid = (programs, spec.groups, 1)
        self._lists: tuple[torch.Tensor, ...] | None = None
        self._numbers: tuple[Any, ...] = (n_rows, pitch, n_offsets, *spec.following)
        self._n_values = n_rows * spec.columns
        self._sum_grid = (-(-self._n_values // 1024), 1, 1) if spec.splits > 1 else (0, 0, 0)
        if not isinstance(table, TileList) and table.data_ptr() & 15:
            self._key = number_of((self._key, "unaligned table"))  # compiled apart
        # Addresses serve a compiled kernel as well as views do, and cost nothing.
        self._addressed = spec.target.takes_addresses
        if not self._addressed:
            return
        lists: tuple[int, ...]
        if isinstance(table, TileList):
            base = table.memory.data_ptr()
            nbr, rows, live, n_live = table.section_starts(tile.block_m)
            lists = (base + 4 * nbr, base + 4 * rows, base + 4 * live, base + 4 * n_live)
        else:
            lists = (table.data_ptr(),) * 4
        self._numbers = (*lists, *self._numbers)

    def count_rows(self, count: torch.Tensor) -> None:
        """Have launches over a plain table end with the rows in use. count: int32 [1], one less than those."""
        if isinstance(self.table, TileList):
            return  # which tells by itself
        self._lists = self.table, self.table, self.table, count
        lists = (*self._numbers[:3], count.data_ptr()) if self._addressed else ()
        n_rows, *others = self._numbers[len(lists) :]
        self._numbers = (*lists, -n_rows, *others)

    @property
    def tile(self) -> TileConfig:
        """The tile that is launched."""
        return self.spec.tile

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constexprs."""
        return self.spec.constants

    def _views(self) -> tuple[torch.Tensor, ...]:
        """(nbr, rows, live, n_live)."""
        if self._lists is None and isinstance(self.table, TileList):
            lists = self.table.lists(self.tile.block_m)
            self._lists = (self.table.packed, self.table.rows, *lists)
        return self._lists or (cast("torch.Tensor", self.table),) * 4

    def __call__(self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors | None, y: torch.Tensor) -> torch.Tensor:
        """x [N_in, groups * c_in] (unit channel stride), w any layout, vectors (bias, mean, var,
        gain, beta) [groups * c_out] and the residual, like y, those that the epilogue does not name
        None, or None for no epilogue, y written whole [n_rows, groups * c_out], contiguous.
        Twin in C: `launched_product`."""
        if vectors is None or not self.spec.epilogue.parts:
            vectors = NO_VECTORS
        if not (self._addressed and self._started(x, w, vectors, y)):
            self._launch(x, w, vectors, y)
        return y

    def _started(self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors, y: torch.Tensor) -> bool:
        """Run kernels that have run before for tensors like these, all at multiples of 16 bytes and
        rows of x side by side. False where that is not so, and nothing ran. Twin in C: `variant_key`."""
        spec, read = self.spec, None
        x_at, w_at, y_at = x.data_ptr(), w.data_ptr(), y.data_ptr()
        p = q = r = s = t = u = y_at
        if vectors is not NO_VECTORS:
            (p, q, r, s, t, u), read = _read(vectors, y_at)
        kernels = spec.variants.get((self._key, w.dtype, read))
        if (
            kernels is None
            or (x_at | w_at | y_at) & 15
            or x.stride()[0] != spec.columns_in
            or (self.blank and spec.splits > 1)
        ):
            return False
        entry, sums = kernels
        index, numbers = spec.device.index, self._numbers
        if sums is None:
            values = (x_at, w_at, p, q, r, s, t, u, y_at, *numbers)
            return begin(entry, index, self.grid, values, spec.constants)
        partial = y.new_empty(spec.splits * self._n_values, dtype=torch.float32)
        at = partial.data_ptr()
        values = (x_at, w_at, y_at, y_at, y_at, y_at, y_at, y_at, at, *numbers)
        if not begin(entry, index, self.grid, values, spec.constants):
            return False
        values = (at, p, q, r, s, t, u, y_at, self._n_values, spec.columns, *spec.floats)
        if not begin(sums, index, self._sum_grid, values, spec.sum_constants):
            self._sum(partial, vectors, y)
        return True

    def _launch(self, x: torch.Tensor, w: torch.Tensor, vectors: Vectors, y: torch.Tensor) -> None:
        """Run kernels that may have to be compiled."""
        spec, split, out, read = self.spec, self.spec.splits, y, vectors
        if split > 1:
            fresh, read = torch.zeros if self.blank else torch.empty, NO_VECTORS
            out = fresh(split * self._n_values, dtype=torch.float32, device=spec.device)
        x_at, w_at, y_at, out_at = x.data_ptr(), w.data_ptr(), y.data_ptr(), out.data_ptr()
        aligned: object = True
        if (x_at | w_at | y_at | out_at) & 15:
            aligned = alignment_at(x_at, w_at, y_at, out_at)
        end_at, operand_key = _read(read, y_at)
        stride_xn, numbers = x.stride()[0], self._numbers
        row_kind = spec.row_kind
        if stride_xn != spec.columns_in:
            row_kind = specialise(stride_xn)
            numbers = (*numbers[:-6], stride_xn, *numbers[-5:])  # the first of six strides
        key = (self._key, aligned, w.dtype, operand_key, row_kind)
        index, values = spec.device.index, (x_at, w_at, *end_at, out_at, *numbers)
        if not (self._addressed and self.kernel.start(index, key, self.grid, values, spec.constants)):
            numbers = numbers[4:] if self._addressed else numbers
            args = (x, w, *tensors_of(read, y), out, *self._views(), *numbers)
            self.kernel.launch(spec.device, spec.target, self.grid, args, spec.constants, spec.options, key)
        sums = self._sum(out, vectors, y) if split > 1 else None
        entry = self.kernel.compiled(index, key) if self._addressed else None
        if entry is None or aligned is not True or row_kind is not spec.row_kind:
            return
        if split == 1 or (sums is not None and not spec.wide):
            ends = None if vectors is NO_VECTORS else _read(vectors, y_at)[1]
            spec.variants[self._key, w.dtype, ends] = entry, sums

    def _sum(self, partial: torch.Tensor, vectors: Vectors, y: torch.Tensor) -> Entry | None:
        """Add the partial sums up and apply the epilogue; the compiled kernel that does."""
        spec, n_values = self.spec, self._n_values
        out_at, y_at = partial.data_ptr(), y.data_ptr()
        end_at, operand_key = _read(vectors, y_at)
        aligned = alignment_at(out_at, y_at)
        key = (spec.sum_constants, y.dtype, operand_key, aligned, n_values >= 1 << 31)
        numbers = (n_values, spec.columns, *spec.floats)
        index, values = spec.device.index, (out_at, *end_at, y_at, *numbers)
        if not (self._addressed and sum_partials_kernel.start(index, key, self._sum_grid, values, spec.sum_constants)):
            args = (partial, *tensors_of(vectors, y), y, *numbers)
            sum_partials_kernel.launch(
                spec.device, spec.target, self._sum_grid, args, spec.sum_constants, {"num_warps": 4}, key
            )
        return sum_partials_kernel.compiled(index, key) if self._addressed else None
