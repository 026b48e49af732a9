"""One table of tolerances: every row is there, in order, and found by each of its names."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_bridge import tolerances


@pytest.mark.parametrize("purpose", tolerances.TABLE)
def test_rows_are_in_order(purpose):
    rows = tolerances.TABLE[purpose]
    for limits in rows.values():
        assert (0 < min(limits) < 1 and limits.rms <= limits.largest) or limits.largest < math.inf
    for finer, coarser in (("fp64", "fp32"), ("fp32", "tf32"), ("fp32", "fp16"), ("fp16", "bf16")):
        if finer in rows and coarser in rows:
            assert min(rows[finer]) <= min(rows[coarser])


def test_names_of_a_precision():
    product = tolerances.TABLE["product"]
    assert tolerances.of("product", torch.bfloat16) is product["bf16"]
    assert tolerances.of("product", "float64") is product["fp64"]
    for name in ("ieee", "tf32x3", "fp32", torch.float32):
        assert tolerances.of("product", name) is product["fp32"]
    assert tolerances.of("product", "tf32") is not product["fp32"]
    for purpose, precision in (("product", torch.int32), ("guess", "fp32")):
        with pytest.raises(KeyError):
            tolerances.of(purpose, precision)


def test_every_purpose_is_described():
    assert all(f"| `{purpose}` |" in tolerances.__doc__ for purpose in tolerances.TABLE)
