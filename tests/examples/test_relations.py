"""The example of relations learns."""

from __future__ import annotations

import re

import pytest

from .launch import start, wait


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_learns(device: str) -> None:
    pytest.importorskip("torch_geometric")
    output = wait(start("examples/relations.py", "--persons", "600", "--device", device))
    shares = [float(share) for share in re.findall(r"([\d.]+) % of the others", output)]
    assert len(shares) == 3 and shares[0] < 45 and shares[-1] > 60, output
