"""A layer costs the same through every API: the products it launches are the same ones, kernel
for kernel, with the same grids and sizes, as through spconv's API."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.workloads import shell
from sparse_bridge import enable, settings
from tests.adapters.spconv import apis
from tests.conftest import EMULATED, INTERPRETED
from tests.quick import quick

pytest.importorskip("triton")
counting = pytest.importorskip("benchmarks.cold.counting", reason="needs the emulator")
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="has a driver of its own")]

FLOWS = ("masked", "sm_90"), ("grouped", "gfx942")
CASES = [(*flow, bias) for flow in FLOWS for bias in (False, True)]


def _launches(arch: str, step, x: torch.Tensor, dataflow: str) -> list[Any]:
    """What forward and backward launch of a layer that meets its map for the second time."""
    found: list[Any] = []
    run = counting.Counted.run

    def record(form, *given):
        sizes = [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in given[9:]]
        found.append((form.name, given[:3], form.source.constants, form.options, sizes))
        run(form, *given)

    with (
        counting.counting(arch, pretend_gpu=False),
        settings.override(dataflow=dataflow),
        mock.patch.object(counting.Counted, "run", record),
    ):
        for _ in range(2):
            found.clear()
            y = step(x)
            y.backward(torch.ones_like(y))
    return found


@pytest.mark.parametrize("case", quick([CASES[0], CASES[-1]], CASES), ids=lambda case: "-".join(map(str, case)))
def test_a_shell(case):
    dataflow, arch, bias = case
    scene, channels = shell(16), 48
    x = torch.randn(len(scene.coords), channels).half().requires_grad_()
    with apis.standin() as sp:
        layer = sp.SubMConv3d(channels, channels, 3, bias=bias, indice_key="a").half()
        tensor = sp.SparseConvTensor(x, scene.coords, list(scene.shape), 1)

        def spconv(x):
            nonlocal tensor
            result = layer(tensor.replace_feature(x))
            tensor = result.replace_feature(x)  # knows the map
            return result.features

        expected = _launches(arch, spconv, x, dataflow)
    with enable("flex_gemm", mode="standin"):
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        weight = layer.weight.detach().clone().requires_grad_()
        added = layer.bias.detach().clone().requires_grad_() if bias else None
        cache = None

        def flex_gemm(x):
            nonlocal cache
            size = torch.Size([1, channels, *scene.shape])
            y, cache = sparse_submanifold_conv3d(x, scene.coords, size, weight, added, cache)
            return y

        launched = _launches(arch, flex_gemm, x, dataflow)
    assert sum("gemm" in name for name, *_ in expected) == 3
    assert launched == expected
