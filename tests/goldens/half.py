"""Recorded answers in half precision: forward and backward within that dtype's tolerance."""

from __future__ import annotations

import pytest
import torch

from tests import checks
from tests.goldens import driver
from tests.goldens.compare import Report

LANES = [
    pytest.param(device, dtype, id=f"{device}-{str(dtype)[6:]}", marks=marks)
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for dtype in (torch.float16, torch.bfloat16)
]


class HalfReport(Report):
    """Arrays are compared as the tests of the operators compare them."""

    def __init__(self, case):
        super().__init__(case.measure, 0.0)
        self.dtype, self.name = case.dtype, case.entry["id"]

    def close(self, label, got, want, tolerance=None, mean=False):
        self.comparisons += 1
        assert got.dtype == self.dtype, f"{self.name} {label}: {got.dtype}"
        checks.assert_close(got, torch.from_numpy(want), self.dtype, f"{self.name} {label}")


def judge(dialect, entry, device, dtype):
    """Run one case in `dtype`: its weights, its inputs, its answers and their gradients."""
    case = dialect(entry, driver.load_arrays(entry["path"]), device=device, dtype=dtype)
    case.report = HalfReport(case)
    return case.judge()
