"""The balanced dataflow: forward and gradients, every kind of map, and which maps it leaves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import registry
from sparse_bridge.core.conv.dataflow import Case
from sparse_bridge.core.conv.epilogue import Norm
from sparse_bridge.core.device import serving
from sparse_bridge.core.maps.rows import Rows
from sparse_bridge.errors import DeviceError, KernelError
from sparse_bridge.kernels.gemm import balanced_gemm
from sparse_bridge.kernels.runtime.target import described
from sparse_bridge.kernels.tiles.tile_config import TileConfig
from tests.checks import assert_close
from tests.core.conv.test_override import Conv, flows
from tests.core.layers import KINDS, check, layer, leaves, tensors


@pytest.fixture
def lane(kernel_lane, monkeypatch):
    """A lane whose dataflow is the balanced one, with tiles shared as early as can be."""
    monkeypatch.setattr(balanced_gemm, "_LEAST_STEPS", 1)
    monkeypatch.setattr(balanced_gemm, "room_for", lambda *_: 6)
    with settings.override(dataflow="balanced"):
        yield dataclasses.replace(kernel_lane, dataflow="balanced")


on_kernels = pytest.mark.emulated


@on_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(lane, kind):
    check(layer(kind, 2, device=lane.device), 16, 24, lane)


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_odd_channels(lane, dtype):
    check(layer("submanifold", 2, device=lane.device), 17, 33, lane, dtype=dtype)


@on_kernels
def test_many_offsets_and_groups(lane):
    made = layer("submanifold", shape=(3, 4, 3), kernel=5, device=lane.device)
    check(made, 6, 8, lane, groups=2)


@on_kernels
def test_norm_sum_and_activation(lane):
    made = layer("submanifold", 2, device=lane.device)
    x, weight, bias, dy = tensors(made, 16, 16)
    mean, var = torch.randn(16) / 8, torch.rand(16) + 0.5
    there = [one.to(lane.device) for one in (x, weight, bias, dy, mean, var)]
    y = functional.conv(
        *there[:3], made.kmap, norm=Norm(there[4], there[5], None, None, 1e-3),
        residual=there[3], activation="relu",
    )  # fmt: skip
    want = made.truth(x, weight, bias).double()
    want = torch.nn.functional.batch_norm(want, mean.double(), var.double(), eps=1e-3)
    assert_close(y, (want + dy.double()).relu())


@on_kernels
def test_results_repeat_and_are_about_those_of_the_masked_dataflow(lane):
    found = []
    for flow in ("balanced", "balanced", "masked"):
        made = layer("submanifold", 2, device=lane.device)
        x, weight, _, dy = tensors(made, 16, 16)
        a, b = leaves((x, weight), lane.device)
        with settings.override(dataflow=flow):
            y = functional.conv(a, b, None, made.kmap)
            y.backward(dy.to(lane.device))
        found.append((y.detach(), a.grad, b.grad))
    assert all(torch.equal(one, two) for one, two in zip(found[0], found[1], strict=True))
    for one, two in zip(found[0], found[2], strict=True):
        assert_close(one, two.double())


@on_kernels
def test_rows_that_only_the_device_knows(lane):
    """As captured graphs have them: rows behind the last are what nothing adds up to."""
    made = layer("submanifold", 2, device=lane.device)
    x, weight, _, _ = tensors(made, 16, 16)
    book = made.kmap.rulebook
    last = torch.tensor([len(x) - 1], dtype=torch.int32, device=lane.device)
    book.x = book.y = Rows(None, last, len(x))
    y = functional.conv(x.to(lane.device), weight.to(lane.device), None, made.kmap)
    assert_close(y, made.truth(x, weight))


@on_kernels
def test_a_module_takes_it(kernel_lane):
    made = layer("submanifold", 2, device=kernel_lane.device)
    x, weight, _, _ = tensors(made, 16, 16)
    module = Conv(weight).to(kernel_lane.device)
    sparse_bridge.dataflow(module, "balanced")
    assert flows(module, x.to(kernel_lane.device), made.kmap) == ["balanced"]
    assert_close(module(x.to(kernel_lane.device), made.kmap), made.truth(x, weight))
    assert "balanced dataflow given to" in str(sparse_bridge.report())
    sparse_bridge.dataflow(module, None)


@on_kernels
def test_maps_of_too_many_tiles_stay_masked(lane, monkeypatch):
    """By rule of the dataflow; a launch that would leave rows out is an error."""
    made = layer("submanifold", 2, device=lane.device)
    monkeypatch.setattr(balanced_gemm, "MOST_TILES", 1)
    x, weight, _, _ = tensors(made, 16, 16)
    module = Conv(weight).to(lane.device)
    assert flows(module, x.to(lane.device), made.kmap) == ["masked"]
    assert_close(module(x.to(lane.device), made.kmap), made.truth(x, weight))
    flow = registry.entry("balanced")
    target = serving.kernel_target(torch.device(lane.device))
    table, _ = made.kmap.rulebook.tiles(0, target)
    from sparse_bridge.core.geometry.weights import layout_of
    from sparse_bridge.kernels.gemm.product import EpilogueForm, Product

    product = Product(
        target, torch.device(lane.device), torch.float32, "ieee", layout_of(weight, "vio"),
        EpilogueForm(),
    )  # fmt: skip
    spec = flow.spec(product, TileConfig(64, 16, 16, 4, 2))
    with pytest.raises(KernelError, match="tiles; its programs look at 1 at most"):
        flow.launch(spec, table, len(x), len(x))


def test_amd_gpus_are_left_out(monkeypatch):
    """Whose programs have not been seen to hand sums to each other."""
    flow, case = registry.entry("balanced"), Case(torch.device("cuda", 0), torch.float32)
    for arch, raw, served in (
        ("gfx942", True, False),
        ("gfx942", False, True),
        ("sm_90", True, True),
    ):
        target = dataclasses.replace(described(arch), raw=raw)
        monkeypatch.setattr(
            "sparse_bridge.core.conv.kernel_products.kernel_target", lambda d, t=target: t
        )
        monkeypatch.setattr("sparse_bridge.core.device.self_check.problem", lambda *_: None)
        reasons = flow.unsupported_reasons(case)
        assert (not reasons) == served
        if reasons:
            assert reasons[0].device and "NVIDIA" in reasons[0].text
            with settings.override(dataflow="balanced"), pytest.raises(DeviceError, match="NVIDIA"):
                registry.choose(case)


@pytest.mark.gpu
def test_streams_and_graphs_at_the_same_time():
    """One map, three streams and a graph at work at once: each has sums of its own."""
    made = layer("submanifold", shape=(40, 40, 40), share=0.1, dense=False, device="cuda")
    x, weight, _, _ = tensors(made, 64, 64)
    x, weight = x.cuda().half(), weight.cuda().half()
    with settings.override(dataflow="balanced"), torch.no_grad():
        want = functional.conv(x, weight, None, made.kmap)
        streams = [torch.cuda.Stream() for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [functional.conv(x, weight, None, made.kmap) for _ in range(20)]
        found = []
        for _ in range(20):
            graph.replay()
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(functional.conv(x, weight, None, made.kmap))
        torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in (*found, *captured))
