"""Results do not depend on the order in which waves and workgroups take turns.

Each problem runs under several schedules (other orders, random time slices) and must give the same
bits: a race or a missing barrier shows as a difference.
"""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from tests.clouds import cloud
from tests.core.layers import both_tables, layer, leaves, tensors
from tests.kernels.calls import schedules

pytestmark = [pytest.mark.emulated]


def same(lane, run):
    """`run()` under every schedule; its tensors, which all agree."""
    runs = [run() for _ in schedules(lane)]
    assert len(runs) == 3
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert torch.equal(one, two)
    return runs[0]


def crowded(shape=(9, 10), seed=3):
    """Coordinates in random order, a third of them twice."""
    coords = cloud(shape, 2, 0.8, seed)
    return torch.cat([coords, coords[::3]]).contiguous()


@pytest.mark.parametrize("kind", ["submanifold", "strided", "generative", "between"])
def test_maps(kernel_lane, kind):
    shape, offsets = (9, 10), functional.kernel_offsets((3, 3))

    def run():
        cmap = functional.coordinate_map(crowded().to(kernel_lane.device), shape, 2)
        if kind == "submanifold":
            kmap, made = functional.submanifold(cmap, offsets), cmap.coords
        elif kind == "between":
            outer = functional.coordinate_map(crowded(seed=4).to(kernel_lane.device), shape, 2)
            kmap, made = functional.between(cmap, outer, offsets, 1), outer.coords
        else:
            new, kmap = getattr(functional, kind)(cmap, offsets, 2)
            made = new.coords
        lists = kmap.rulebook.lists()
        return [made, *both_tables(kmap), lists.in_rows, lists.out_rows]

    made, table, *_ = same(kernel_lane, run)
    assert len(made) > 20 and (table >= 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind, kernel", [("submanifold", 3), ("strided", 2), ("inverse", 2)])
def test_layers(kernel_lane, kind, kernel, dtype):
    made = layer(kind, 2, kernel, shape=(12, 13), share=0.5, device=kernel_lane.device, seed=5)
    assert len(made.x_coords) > 64 or kind == "inverse"
    *operands, dy = tensors(made, 24, 40, dtype=dtype)

    def run():
        x, weight, bias = leaves(operands, kernel_lane.device)
        y = functional.conv(x, weight, bias, made.kmap)
        y.backward(dy.to(kernel_lane.device))
        return [y.detach(), x.grad, weight.grad, bias.grad]

    y, *_ = same(kernel_lane, run)
    assert y.abs().sum() > 0


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_pools(kernel_lane, mode):
    made = layer("strided", 3, 2, device=kernel_lane.device, seed=6)
    values = torch.randn(len(made.x_coords), 20)
    batch = made.x_coords[:, 0].to(kernel_lane.device)

    def run():
        (x,) = leaves([values], kernel_lane.device)
        y = functional.pool(x, made.kmap, mode)
        total = functional.global_pool(x, batch, 2, mode)
        (y.square().sum() + total.square().sum()).backward()
        return [y.detach(), total.detach(), x.grad]

    same(kernel_lane, run)
