"""The same layers wherever maps can be built: torch code, kernels, interpreter, emulated GPUs."""

from __future__ import annotations

import pytest
import torch

from tests import checks

from . import oracle
from .conftest import speaking
from .test_conv import check, points, triple, weights

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.mark.parametrize("release", ["2.1", "1.4"])
@pytest.mark.parametrize("kernel, stride, padding", [(3, 1, 0), (2, 1, 0), (2, 2, 0), (3, 2, 1)])
def test_maps(lane, release, kernel, stride, padding):
    with speaking(release) as ts:
        ts.release = release
        coords = points(release, shape=(4, 3, 5), seed=1)
        check(ts, coords, kernel, stride, padding, 2, 3, device=lane.device, dtype=torch.float32)


def test_maps_with_a_range(lane):
    with speaking("2.1") as ts:
        ts.release = "2.1"
        coords = points("2.1", shape=(4, 3, 5), seed=2)
        check(ts, coords, 2, 2, 0, 2, 3, extent=(5, 4, 6), device=lane.device, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2)])
def test_values(lane, kernel, stride, dtype):
    """In the kernels' own precisions."""
    with speaking("2.1") as ts:
        coords = points("2.1", shape=(5, 4, 3), seed=3, share=0.5)
        feats = torch.randn(len(coords), 3).to(dtype)
        weight = weights(triple(kernel), 3, 17, torch.float32).to(dtype)
        sites = oracle.to_sites(coords, "2.1")
        out, triples = oracle.layer(sites, triple(kernel), triple(stride), (0, 0, 0), (1, 1, 1), "2.1")
        leaves = [t.clone().requires_grad_() for t in (feats, weight)]
        want = oracle.product(*leaves, None, triples, len(out))
        want.sum().backward()
        ours = [t.clone().to(lane.device).requires_grad_() for t in (feats, weight)]
        x = ts.SparseTensor(ours[0], coords.to(lane.device))
        y = ts.nn.functional.conv3d(x, ours[1], kernel, stride=stride)
        checks.assert_close(y.F, want, dtype)
        y.F.sum().backward()
        for one, other in zip(ours, leaves, strict=True):
            checks.assert_close(one.grad, other.grad, dtype, "gradient")
