"""Weights in every memory order: what kernels and torch make of them has the bits of contiguous ones."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import memory_limit
from sparse_bridge.core import functional as F
from sparse_bridge.core.geometry.weights import fills_its_memory, is_read_as_copy, layout_of
from sparse_bridge.errors import MemoryLimitError
from tests.layouts import expanded, layouts

SIZES = {"ovi": lambda c, groups: (16, 3, 3, 3, c // groups), "vio": lambda c, groups: (27, c // groups, 16)}


def scene(device="cpu", n_rows=30):
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(64, generator=generator)[:n_rows]
    coords = torch.stack(torch.unravel_index(cells, (1, 4, 4, 4)), 1).int().to(device)
    return F.submanifold(F.coordinate_map(coords, (4, 4, 4), 1), F.kernel_offsets((3, 3, 3)))


def results(kmap, weight, layout, groups, c_in):
    x = torch.randn(kmap.n_in, c_in, generator=torch.Generator().manual_seed(1)).to(weight)
    x, weight = x.requires_grad_(), weight.detach().requires_grad_()
    y = F.conv(x, weight, None, kmap, layout=layout, groups=groups)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return y.detach(), x.grad, weight.grad


def weights(layout, groups, c_in, dtype, device):
    weight = torch.randn(SIZES[layout](c_in, groups), generator=torch.Generator().manual_seed(3))
    weight = weight.to(dtype).to(device)
    return {**layouts(weight), **expanded(weight)}


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("layout", SIZES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.float64), ids=str)
def test_every_order_in_torch(dtype, layout, groups):
    """Halves are cast for their products, and a cast tensor has other strides where the first had gaps."""
    kmap = scene()
    for name, weight in weights(layout, groups, 8, dtype, "cpu").items():
        want, got = (results(kmap, w, layout, groups, 8) for w in (weight.contiguous(), weight))
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")
        if fills_its_memory(weight):
            assert got[2].stride() == weight.stride(), name


@pytest.mark.parametrize("c_in", (4, 16))
def test_orders_in_kernels(kernel_lane, c_in):
    kmap = scene(kernel_lane.device)
    made = weights("ovi", 1, c_in, torch.float32, kernel_lane.device)
    for name in ("as it is", "axes reversed", "channels last", "every second along 4", "expanded along 2"):
        weight = made[name]
        want, got = (results(kmap, w, "ovi", 1, c_in) for w in (weight.contiguous(), weight))
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_only_kernels_in_another_order_are_copied():
    read = {layout: weights(layout, 1, 8, torch.float32, "cpu") for layout in SIZES}
    copied = [name for name, weight in read["ovi"].items() if is_read_as_copy(weight, "ovi")]
    assert {"axes reversed", "inner axes reversed", "channels last", "every second along 2"} < set(copied)
    plain = ("as it is", "last axis first", "first axis last", "part along 0", "every second along 4")
    assert not {*plain, "expanded along 0", "expanded along 4"} & set(copied)
    assert not any(is_read_as_copy(weight, "vio") for weight in read["vio"].values())
    for name in plain:
        weight = read["ovi"][name]
        assert torch.equal(layout_of(weight, "ovi").stacked(weight), weight.flatten(1, 3).permute(1, 2, 0)), name


def test_a_copy_counts_under_a_memory_limit():
    kmap, weight = scene(), torch.randn(64, 3, 3, 3, 64).contiguous(memory_format=torch.channels_last_3d)
    x = torch.randn(30, 64)
    with torch.no_grad():
        want = F.conv(x, weight.contiguous(), None, kmap, layout="ovi")
        with memory_limit(8 << 20):
            assert torch.equal(F.conv(x, weight, None, kmap, layout="ovi"), want)
        with memory_limit(600 << 10), pytest.raises(MemoryLimitError, match="contiguous copy of a weight"):
            F.conv(x, weight, None, kmap, layout="ovi")
