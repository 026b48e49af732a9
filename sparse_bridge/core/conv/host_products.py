"""Matrix products on plain tensors, without gradients, by the quickest library there is.

A row of a product has the same bits wherever it stands and however many rows there are. MKL gives
the last rows of a product, those that fill no whole step of its kernels, other bits, and divides
the sums of a product of very few rows among threads: so rows are filled up (`height_of`). Where
they are no multiple of 16 bytes, their addresses count as well: such matrices are padded. What a
shape takes is tried once (`Shape`).

torch multiplies fp32 matrices on CPUs by MKL, which keeps to AVX2 on processors of other makers
than its own. oneDNN, which torch carries too, takes what the processor has (with AVX-512: 1.8 to
2.5 times as fast on AMD Zen 4, 0.7 to 0.9 times on Intel); behind `torch.mm` it only serves half
precision. One product, timed once per process, decides; after that a layer's matrix does, whatever
its rows. oneDNN prepares every shape it meets for about a millisecond, for factors with gaps up to
half a second: it gets few shapes and dense factors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import state
from ..device import rocm

BLOCK = 4096  # rows of a product: what it reads and writes stays in a core's cache
STEP = 512  # row counts given to oneDNN are multiples, or one of these
_FEW = (16, 64, 256)
ROWS = 16  # rows that MKL's kernels, and those of GPUs, take in whole steps
_ALIGNED = 64  # bytes: what torch's memory on the CPU is a multiple of
_MOST = 512  # rows from which on no library divides a sum of a row
_GPU_ROWS = 128  # rows that cuBLAS does not take for few: below 64 sums of fp64 had other bits
# Values of a matrix from which on oneDNN's fixed cost (15 us, and a copy, for it only returns new
# memory) is repaid.
_PAYS = 32 * 32
# Multiply-adds and size of the result from which on it is, for transposed factors, which it turns.
_PAYS_TRANSPOSED = 1 << 23
_LARGE = 64 * 64
_NARROW = 16  # bytes of rows that numpy copies in half of torch's time, at most
_CLEARLY = 1.3  # how much faster it has to be, so that every run of a machine decides alike


@functools.cache
def onednn() -> Any:
    """oneDNN's (x [M, K], w [N, K], ...) -> x @ w^T, or None where it is no gain or not there."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:  # a build that registers oneDNN's operators otherwise
        return None
    # Whatever the caller's default dtype, device and inference mode are.
    with torch.device("cpu"), torch.inference_mode(False):
        x, w, out = (torch.ones(n, 64, dtype=torch.float32) for n in (BLOCK, 64, BLOCK))
    torch_s = _quickest(lambda: rocm.mm(x, w, out=out))
    onednn_s = _quickest(lambda: out.copy_(linear(x, w, None, "none", [], "")))
    return linear if _CLEARLY * onednn_s < torch_s else None


@state.owns
def reset() -> None:
    """Find out again whether oneDNN is the quicker one, and what MKL takes for few rows."""
    onednn.cache_clear()
    _tried.cache_clear()


def _quickest(run: Callable[[], object]) -> float:
    """Seconds of the quickest of some runs."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def by_onednn(w: torch.Tensor) -> bool:
    """Whether oneDNN multiplies rows by the matrix w [K, N] on the CPU: fp32 of 1024 values or more, where torch has
    it."""
    return (
        w.dtype == torch.float32
        and w.numel() >= _PAYS
        and w.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and onednn() is not None
    )


class Shape(NamedTuple):
    """How MKL has to be asked: in products of at least `rows` rows, a multiple of ROWS, with
    matrices whose sides are multiples of `unit`."""

    rows: int
    unit: int


def height_of(n_rows: int, w: torch.Tensor) -> int:
    """Rows that a product of `n_rows` rows by the matrix w [K, N], any float dtype, had best write, filled up."""
    if by_onednn(w):
        return n_rows  # it returns new memory, of which the rest is left behind
    least = _GPU_ROWS if w.device.type != "cpu" else _shape_of(w).rows
    return max(least, -(-n_rows // ROWS) * ROWS)


def _rounded_up(n_rows: int) -> int:
    """The fewest rows of oneDNN's shapes that hold `n_rows`."""
    return next((n for n in _FEW if n_rows <= n), -(-n_rows // STEP) * STEP)


def _shape_of(w: torch.Tensor) -> Shape:
    (k, n), (step_k, step_n) = w.shape, w.stride()
    return _tried(w.dtype, k, n, step_k <= step_n, torch.get_num_threads())


@functools.cache
def _tried(dtype: torch.dtype, k: int, n: int, turned: bool, threads: int) -> Shape:
    """The first shape in which equal rows have equal bits wherever they stand, and few rows those
    that they have among many.  turned: the matrix lies column by column."""
    make = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        for unit in (1, 16 // dtype.itemsize, 64 // dtype.itemsize):
            k, n = (-(-side // unit) * unit for side in (k, n))
            x = torch.randn(_MOST, k, dtype=dtype, generator=make)
            w = torch.randn(k, n, dtype=dtype, generator=make)
            w = w.t().contiguous().t() if turned else w
            same, many, rows = _product(x[:1].repeat(_MOST, 1), w), _product(x, w), ROWS
            while rows < _MOST and not torch.equal(_product(x[:rows], w), many[:rows]):
                rows *= 2
            if torch.equal(same, same[:1].expand_as(same)):
                break
    return Shape(rows, unit)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w as it is: autocast does not touch products into memory."""
    return rocm.cpu_mm(x, w, out=x.new_empty((len(x), w.shape[1])))


def together(w: torch.Tensor) -> bool:
    """Whether products of w [K, N], float, on the CPU are MKL's, filled up to whole steps and no further: a caller
    of many need not ask again."""
    return not by_onednn(w) and _shape_of(w) == (ROWS, 1)


def gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, C] = the rows int32 [M] of x [N, C], which exist, without gradients."""
    narrow = x.device.type == "cpu" and x.shape[1] * x.element_size() <= _NARROW
    if narrow and x.is_contiguous():
        values, indices, result = (tensor.detach().numpy() for tensor in (x, rows, out))
        values.take(indices, 0, result, "clip")
    else:
        torch.index_select(x, 0, rows, out=out)


def mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x [M, K] @ w [K, N] into `out` [M, N], which is returned; one float dtype, no gradients. `x` may go on past
    `out`'s rows, into scrap."""
    n_rows = out.shape[0]
    if x.device.type != "cpu":
        if w.dtype == torch.float64 and n_rows < _GPU_ROWS:
            return out.copy_(_product(_filled(x, n_rows, _GPU_ROWS), w)[:n_rows])
        return rocm.mm(x[:n_rows], w, out=out)
    if by_onednn(w):
        return _mm_onednn(x, w, out)
    shape = _shape_of(w)
    if shape.unit > 1:
        return _mm_padded(x, w, out, shape)
    n_full = n_rows - n_rows % ROWS if n_rows >= shape.rows else 0
    if n_full:
        rocm.cpu_mm(_aligned(x[:n_full]), w, out=out[:n_full])
    if n_full < n_rows:
        last = _filled(x[n_full:], n_rows - n_full, shape.rows)
        out[n_full:].copy_(_product(last, w)[: n_rows - n_full])
    return out


def _mm_padded(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, shape: Shape) -> torch.Tensor:
    """With zeros in place of what is missing of whole units, block by block."""
    k, n = (-(-side // shape.unit) * shape.unit for side in w.shape)
    matrix = w.new_zeros((k, n))
    matrix[: w.shape[0], : w.shape[1]] = w
    for begin in range(0, out.shape[0], BLOCK):
        part = out[begin : begin + BLOCK]
        rows = x.new_zeros((max(shape.rows, -(-len(part) // ROWS) * ROWS), k))
        rows[: len(part), : x.shape[1]] = x[begin : begin + len(part)]
        part.copy_(_product(rows, matrix)[: len(part), : w.shape[1]])
    return out


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rocm.linear` with gradients, whose rows keep their bits, too: x [N, K] @ w [K, M] + bias ([M], [1, M] or
    None), of one float dtype unless autocast is on."""
    n_rows, missing = x.shape[0], [0, 0]
    if x.device.type == "cpu":
        shapes = _shape_of(w), _shape_of(w.t())
        least, step = max(shape.rows for shape in shapes), ROWS
        unit = max(shape.unit for shape in shapes)
        missing = [-side % unit for side in w.shape]
        x = _aligned(x)
    else:
        least, step = _GPU_ROWS if x.dtype == torch.float64 else 1, 1
    n_full = n_rows - n_rows % step if n_rows >= least else 0
    if n_full == n_rows and not any(missing):
        return rocm.linear(x, w, bias)
    pad, columns = torch.nn.functional.pad, w.shape[1]
    if any(missing):
        height = max(least, -(-n_rows // step) * step)
        w = pad(w, (0, missing[1], 0, missing[0]))
        bias = bias if bias is None else pad(bias, (0, missing[1]))
        return rocm.linear(pad(x, (0, missing[0], 0, height - n_rows)), w, bias)[:n_rows, :columns]
    last = rocm.linear(pad(x[n_full:], (0, 0, 0, least - n_rows + n_full)), w, bias)
    last = last[: n_rows - n_full]
    return torch.cat([rocm.linear(x[:n_full], w, bias), last]) if n_full else last


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The same rows, from where new memory may start."""
    return x.clone() if x.storage_offset() * x.element_size() % _ALIGNED else x


def _filled(x: torch.Tensor, n_rows: int, height: int) -> torch.Tensor:
    """x's first `n_rows` rows and others, `height` together."""
    if x.shape[0] >= height:
        return _aligned(x[:height])
    filled = x.new_zeros((height, x.shape[1]))
    filled[:n_rows] = x[:n_rows]
    return filled


def _mm_onednn(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    multiply, turned = onednn(), w.t().contiguous()
    for begin in range(0, out.shape[0], BLOCK):
        part = out[begin : begin + BLOCK]
        rows = _filled(x[begin:], len(part), _rounded_up(len(part)))
        part.copy_(multiply(rows.contiguous(), turned, None, "none", [], "")[: len(part)])
    return out


def add_transposed(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, n_rows: int) -> None:
    """total [K, N] += left [M, K]^T @ right [M, N] of the first `n_rows` rows, of `left`'s dtype.
    Rows behind them are scrap, and may be overwritten."""
    n_padded = -(-n_rows // STEP) * STEP
    pays = total.numel() >= _LARGE and n_rows * total.numel() >= _PAYS_TRANSPOSED
    pays = pays and by_onednn(total) and left.is_contiguous()
    if not pays or n_padded > min(len(left), len(right), BLOCK):
        total.addmm_(left[:n_rows].t(), right[:n_rows])
        return
    if n_rows < n_padded:  # else they may be a layer's own, and autograd counts writes of no rows, too
        left[n_rows:n_padded].zero_()
        right[n_rows:n_padded].zero_()
    left, right = left[:n_padded], right[:n_padded]
    total += onednn()(left.t(), right.t(), None, "none", [], "")
