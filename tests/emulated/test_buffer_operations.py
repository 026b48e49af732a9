"""Buffer operations of AMD's compiler, on and off, give the same bits: maps, layers and pools."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from tests.clouds import cloud
from tests.core.layers import both_tables, layer, leaves, tensors

pytestmark = pytest.mark.emulated


def both(lane, run):
    """`run()` without and with buffer operations; its tensors, which agree."""
    if not lane.arch:
        pytest.skip("a switch of AMD's compiler")
    import amd_emulator

    runs = []
    for switch in (False, True):
        with amd_emulator.patch_triton(lane.arch, buffer_ops=switch):
            runs.append(run())
    for plain, buffered in zip(*runs, strict=True):
        assert torch.equal(plain, buffered)
    return runs[0]


@pytest.mark.parametrize("kind", ["submanifold", "strided", "generative"])
def test_maps(kernel_lane, kind):
    coords = torch.cat([cloud((9, 10), 2, 0.6, 3), cloud((9, 10), 2, 0.2, 4)]).contiguous()

    def run():
        cmap = functional.coordinate_map(coords, (9, 10), 2)
        offsets = functional.kernel_offsets((3, 3))
        if kind == "submanifold":
            new, kmap = cmap, functional.submanifold(cmap, offsets)
        else:
            new, kmap = getattr(functional, kind)(cmap, offsets, 2)
        return [new.coords, *both_tables(kmap)]

    assert (both(kernel_lane, run)[1] >= 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind, kernel", [("submanifold", 3), ("strided", 2)])
def test_layers(kernel_lane, kind, kernel, dtype):
    """Channels that fill no tile: every load is masked, and the loop is pipelined."""
    made = layer(kind, 2, kernel, shape=(12, 13), share=0.5, device=kernel_lane.device, seed=5)
    *operands, dy = tensors(made, 72, 40, dtype=dtype)

    def run():
        x, weight, bias = leaves(operands, kernel_lane.device)
        y = functional.conv(x, weight, bias, made.kmap)
        y.backward(dy)
        return [y.detach(), x.grad, weight.grad, bias.grad]

    assert both(kernel_lane, run)[0].abs().sum() > 0


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_pools(kernel_lane, mode):
    made = layer("strided", 2, 2, device=kernel_lane.device, seed=6)
    values = torch.randn(len(made.x_coords), 20)

    def run():
        (x,) = leaves([values], kernel_lane.device)
        y = functional.pool(x, made.kmap, mode)
        y.square().sum().backward()
        return [y.detach(), x.grad]

    both(kernel_lane, run)
