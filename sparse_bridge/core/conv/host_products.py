"""Matrix products on plain tensors, without gradients, by the quickest library there is.

torch multiplies fp32 matrices on CPUs by MKL, which keeps to AVX2 on processors of other makers
than its own. oneDNN, which torch carries too, takes what the processor has (with AVX-512: 1.8 to
2.5 times as fast on AMD Zen 4, 0.7 to 0.9 times on Intel); behind `torch.mm` it only serves half
precision. One product, timed once per process, decides. oneDNN prepares every shape it meets for
about a millisecond, for factors with gaps up to half a second: it gets few shapes and dense
factors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ... import state
from ..device import rocm

BLOCK = 4096  # rows of a product: what it reads and writes stays in a core's cache
STEP = 512  # row counts given to oneDNN are multiples
# Multiply-adds from which oneDNN's fixed cost (15 us, and a copy, for it only returns new memory)
# is repaid; and, for transposed factors, which it has to turn, also how large the result must be.
_PAYS = 1 << 21
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
    """Find out again whether oneDNN is the quicker one."""
    onednn.cache_clear()


def _quickest(run: Callable[[], object]) -> float:
    """Seconds of the quickest of some runs."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def takes(x: torch.Tensor) -> bool:
    return x.is_contiguous() and not is_plain(x.device, x.dtype) and x.device.type == "cpu"


def is_plain(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own products are the quickest, and right, for fp32 or fp64 of `device`
    whatever their shapes: a caller of many need not ask again."""
    return device.type == "cpu" and not (
        dtype == torch.float32 and onednn() is not None and bool(torch.backends.mkldnn.enabled)
    )


def gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, C] = the rows int32 [M] of x [N, C], which exist, without gradients."""
    narrow = x.device.type == "cpu" and x.shape[1] * x.element_size() <= _NARROW
    if narrow and x.is_contiguous():
        values, places, result = (tensor.detach().numpy() for tensor in (x, rows, out))
        values.take(places, 0, result, "clip")
    else:
        torch.index_select(x, 0, rows, out=out)


def mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x [M, K] @ w [K, N] into `out`. `x` may go on past `out`'s rows, into scrap."""
    n_rows = out.shape[0]
    if min(n_rows, BLOCK) * w.numel() < _PAYS or not takes(x):
        return rocm.mm(x[:n_rows], w, out=out)
    turned = w.t().contiguous()
    for begin in range(0, n_rows, BLOCK):
        size = min(BLOCK, n_rows - begin)
        whole = -(-size // STEP) * STEP
        part = out[begin : begin + size]
        if begin + whole <= x.shape[0]:
            result = onednn()(x[begin : begin + whole], turned, None, "none", [], "")
            part.copy_(result[:size])
        else:
            rocm.mm(x[begin : begin + size], w, out=part)
    return out


def add_transposed(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, n_rows: int
) -> None:
    """total [K, N] += left [M, K]^T @ right [M, N] of the first `n_rows` rows, of `left`'s dtype.
    Rows behind them are scrap, and may be overwritten."""
    whole = -(-n_rows // STEP) * STEP
    pays = total.numel() >= _LARGE and n_rows * total.numel() >= _PAYS_TRANSPOSED
    if not pays or whole > min(len(left), len(right), BLOCK) or not takes(left):
        total.addmm_(left[:n_rows].t(), right[:n_rows])
        return
    left[n_rows:whole].zero_()
    right[n_rows:whole].zero_()
    left, right = left[:whole], right[:whole]
    total += onednn()(left.t(), right.t(), None, "none", [], "")
