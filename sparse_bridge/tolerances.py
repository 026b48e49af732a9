"""How far a result may lie from its reference: one table, by purpose and precision.

Every limit is relative to the RMS of the reference: the largest error of an element, and the RMS of
all errors. Infinite: not compared. Maps, coordinates and row orders are exact and have no limit,
nor has inference that is fused or replayed: it has the bits of layers one by one.

| purpose | what is compared | where |
|---|---|---|
| `product` | one convolution with fp64 of its rounded inputs, or tile with tile | tests, tuner |
| `self_check` | one product of a GPU with the CPU, at its first use | `core/device/self_check` |
| `step` | outputs of a training step on padded rows; norms sum in another order | `core/capture` |
| `gradients` | norms of such a step's gradients: so do sums over rows | `core/capture` |
| `network` | outputs of whole networks | `compat`, `export` |
| `peers` | RMS of two libraries' results | `benchmarks` |
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Limits(NamedTuple):
    """Largest error of an element, and RMS of the errors; inf where that is not compared."""

    largest: float = math.inf
    rms: float = math.inf


def _rms(**limits: float) -> dict[str, Limits]:
    return {precision: Limits(rms=limit) for precision, limit in limits.items()}


TABLE: dict[str, dict[str, Limits]] = {
    "product": {
        "fp64": Limits(1e-10, 1e-11),
        "fp32": Limits(1e-4, 1e-5),
        "tf32": Limits(1e-2, 1e-3),
        "fp16": Limits(2e-2, 4e-3),
        "bf16": Limits(6e-2, 8e-3),
    },
    # fp32 must not round its inputs to TF32.
    "self_check": {"fp32": Limits(1e-4), "tf32": Limits(1e-2), "fp16": Limits(1e-2), "bf16": Limits(6e-2)},
    "step": _rms(fp64=1e-9, fp32=1e-3, fp16=2e-2, bf16=1e-1),
    "gradients": _rms(fp64=2e-2, fp32=2e-2, fp16=8e-2, bf16=15e-2),
    "network": _rms(fp64=1e-9, fp32=1e-4, tf32=1e-2, fp16=3e-2, bf16=2e-1),
    "peers": _rms(fp32=1e-3, tf32=1e-2, fp16=2e-2, bf16=5e-2),
}
# Other names of a precision: torch's dtypes, and how kernels multiply fp32.
_SAME_AS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "ieee": "fp32",
    "tf32x3": "fp32",
}


def of(purpose: str, precision: object) -> Limits:
    """The limits for a purpose of the table.

    precision: a torch dtype, its name, or fp64, fp32, tf32, fp16, bf16, ieee, tf32x3.

    Raises:
        KeyError: the table has no such row.
    """
    name = str(precision).removeprefix("torch.")
    return TABLE[purpose][_SAME_AS.get(name, name)]
