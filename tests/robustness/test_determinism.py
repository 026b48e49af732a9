"""The same bits, run after run: forward and both gradients, on the same maps and on new ones."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from tests.clouds import cloud, features

RUNS = 20
SHAPE = (16, 16, 16)
KINDS = ("submanifold", "strided", "inverse", "generative")


def maps(kind, coords):
    grid = functional.coordinate_map(coords, SHAPE, 2)
    offsets = functional.kernel_offsets((3, 3, 3))
    if kind == "submanifold":
        return functional.submanifold(grid, offsets)
    if kind == "generative":
        return functional.generative(grid, offsets, 2)[1]
    down = functional.strided(grid, offsets, 2)[1]
    return functional.inverse(down) if kind == "inverse" else down


def check(kind, device, c_in, c_out, dtype=torch.float32, repeat=False):
    """RUNS runs; every second one builds its maps anew."""
    coords = cloud(SHAPE, 2, 0.004 if kind == "generative" else 0.3, seed=5, device=device)
    coords = torch.cat([coords, coords[::3]]) if repeat else coords
    kmap = maps(kind, coords)
    x = features(kmap.n_in, c_in, dtype=dtype, device=device).requires_grad_()
    weight = features(27 * c_in, c_out, 1, dtype, device).div_(30).view(27, c_in, c_out)
    weight.requires_grad_()
    dy = features(kmap.n_out, c_out, 2, dtype, device)
    first = None
    for number in range(RUNS):
        kmap = maps(kind, coords) if number % 2 else kmap
        y = functional.conv(x, weight, None, kmap)
        found = [y.detach(), *torch.autograd.grad(y, [x, weight], dy)]
        first = found if first is None else first
        for what, got, want in zip(("y", "dx", "dw"), found, first, strict=True):
            assert torch.equal(got, want), f"{what} of run {number} differs"


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "flow, kind",
    [
        ("per_offset", "submanifold"),
        pytest.param("per_offset", "inverse", marks=pytest.mark.slow),
        pytest.param("per_offset", "strided", marks=pytest.mark.slow),
        pytest.param("per_offset", "generative", marks=pytest.mark.slow),
        pytest.param("explicit", "submanifold", marks=pytest.mark.slow),
    ],
)
def test_on_the_cpu(threads, flow, kind):
    with settings.override(dataflow=flow):
        check(kind, "cpu", 16, 16)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_dtypes_and_repeated_rows_on_the_cpu(threads, dtype):
    check("submanifold", "cpu", 12, 8, dtype, repeat=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flow", ["masked", "unmasked", "grouped", "per_offset", "explicit"])
def test_on_a_gpu(flow, kind, dtype):
    with settings.override(dataflow=flow):
        check(kind, "cuda", 64, 48, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_pools_on_a_gpu(mode):
    coords = cloud(SHAPE, 2, 0.3, seed=5, device="cuda")
    x = features(len(coords), 33, device="cuda").requires_grad_()
    first = None
    for _ in range(RUNS):
        y = functional.pool(x, maps("strided", coords), mode)
        found = [y.detach(), *torch.autograd.grad(y.square().sum(), [x])]
        first = found if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
