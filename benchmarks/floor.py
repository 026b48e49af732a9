"""The least time a layer can take on a device, and the two probes that say how fast the device is.

The floor of a pass is the longer of its multiply-adds at the measured matrix rate and its traffic
at the measured bandwidth: features in and out and one int32 neighbour table [V, N], once each.
Training is three passes (forward, dgrad, wgrad); a fresh map is also read (its coordinates) and
written (the table).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from .measure import synchronize
from .works import TORCH_DTYPES

__all__ = ["Rates", "layer_floor", "probe"]

VOLUME = 27  # kernel offsets of the layers that are timed
_ITEM = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
_COORDINATE_BYTES, _TABLE_BYTES = 16, 4


@dataclasses.dataclass(frozen=True)
class Rates:
    """matrix: multiply-adds x 2 per second of a large product; copy: bytes read and written per
    second of a large copy."""

    matrix: float
    copy: float


def layer_floor(work: str, rows: int, pairs: int, channels: int, dtype: str, rates: Rates) -> float | None:
    """Milliseconds below which a 3x3x3 submanifold layer cannot run; None for other works.

    Args:
        work: "forward", "fresh" or "train".
        rows: N, of input and output.
        pairs: (input row, output row) pairs over all offsets.
        channels: C_in = C_out.
        dtype: a name of `registry.DTYPES`.
        rates: of that dtype on the device.
    """
    if work not in ("forward", "fresh", "train"):
        return None
    passes = 3 if work == "train" else 1
    flops = 2 * pairs * channels * channels
    table = VOLUME * rows * _TABLE_BYTES
    traffic = 2 * rows * channels * _ITEM[dtype] + table
    seconds = passes * max(flops / rates.matrix, traffic / rates.copy)
    if work == "fresh":
        seconds += (rows * _COORDINATE_BYTES + table) / rates.copy
    return seconds * 1e3


def probe(dtype: str, device: torch.device) -> Rates:
    """Measure the device: one large square product in `dtype`, one large copy."""
    large = device.type == "cuda"
    size, length = (8192, 1 << 29) if large else (512, 1 << 24)
    kind = TORCH_DTYPES[dtype]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        a = torch.randn(size, size, device=device).to(kind)
        b = torch.randn(size, size, device=device).to(kind)
        matrix = 2 * size**3 / _median(lambda: a @ b, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.ones(length, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _median(lambda: target.copy_(source), device)
    return Rates(matrix, copy)


def _median(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of a call, after three that do not count."""
    found = []
    for index in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if index >= 3:
            found.append(time.perf_counter() - start)
    return sorted(found)[repeats // 2]
