"""What is compiled beforehand is what layers then ask for."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.conv.dataflow import LayerProduct
from sparse_bridge.core.conv.epilogue import Epilogue
from sparse_bridge.core.device import device_support, self_check
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.warmup import compilation, product_kernels
from sparse_bridge.kernels.runtime import launch, precompile
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.tools.offline_compile import catalogue
from tests import learnt
from tests.adapters.spconv import apis

CPU = torch.device("cpu")
HALF = torch.float16


def products(where=CPU, pointwise=False):
    """(C_in, C_out, dtype, activation, has a norm, trains) of what known layers will ask for."""
    return {
        (
            one.weight.shape[-1] if one.layout == "ovi" else one.weight.shape[1],
            one.weight.shape[0] if one.layout == "ovi" else one.weight.shape[2],
            dtype,
            one.epilogue.activation,
            one.epilogue.norm is not None,
            one.trains,
        )
        for one, dtype in compilation._products(where)
        if one.layer is not None and one.pointwise == pointwise
    }


def encoder():
    import spconv.pytorch as spconv

    def block(c_in, c_out, **options):
        kind = spconv.SparseConv3d if "stride" in options else spconv.SubMConv3d
        conv = kind(c_in, c_out, 3, padding=1, bias=False, **options)
        return spconv.SparseSequential(conv, torch.nn.BatchNorm1d(c_out), torch.nn.ReLU())

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = spconv.SparseSequential(
                block(4, 48, indice_key="a"),
                block(48, 48, indice_key="a"),
                block(48, 80, stride=2),
                block(80, 80, indice_key="b"),
            )
            self.point = spconv.SubMConv3d(80, 8, 1, bias=True)

        def forward(self, x):
            return self.point(self.net(x)).features

    return Encoder()


@pytest.fixture
def spconv(monkeypatch):
    compilation.reset()
    with apis.standin() as module:
        yield module
    compilation.reset()


class TestProducts:
    def test_layers_of_sequences_are_fused_in_inference(self, spconv):
        network = encoder().half().eval()
        assert network.point.conv1x1
        with torch.no_grad():
            found = products()
            assert products(pointwise=True) == {(80, 8, HALF, None, False, False)}
        assert found == {
            (4, 48, HALF, "relu", True, False),
            (48, 48, HALF, "relu", True, False),
            (48, 80, HALF, "relu", True, False),
            (80, 80, HALF, "relu", True, False),
        }

    def test_training_asks_for_gradients_in_the_dtype_of_autocast(self, spconv, fake_gpu):
        network = encoder().train()
        assert {one[2:] for one in products()} == {(torch.float32, None, False, True)}
        fake_gpu.has(autocast=torch.bfloat16)
        assert {one[2:] for one in products()} == {(torch.bfloat16, None, False, True)}
        assert {one[:2] for one in products()} == {(4, 48), (48, 48), (48, 80), (80, 80)}
        del network

    def test_networks_that_are_gone_or_elsewhere_are_not_asked(self, spconv):
        network = encoder()
        assert products() and not products(torch.device("cuda", 0))
        del network
        gc.collect()
        assert products() == set()

    def test_the_other_frameworks(self):
        compilation.reset()
        with sparse_bridge.enable("torchsparse", "minkowski", mode="standin"):
            import MinkowskiEngine as ME
            import torchsparse.nn as spnn

            layers = [
                spnn.Conv3d(4, 24, 3),
                spnn.Conv3d(24, 8, 1),
                ME.MinkowskiConvolution(6, 40, kernel_size=3, dimension=3, bias=True),
            ]
            found = compilation._products(CPU)
        own = {tuple(one.weight.shape): one for one, _ in found if one.layer is not None}
        assert set(own) == {(27, 4, 24), (1, 24, 8), (27, 6, 40)} and len(layers) == 3
        assert own.pop((1, 24, 8)).pointwise
        assert own[27, 6, 40].epilogue.bias.shape == (40,)
        assert all(one.symmetric and one.trains for one in own.values())


@pytest.mark.parametrize(
    ("symmetric", "trains", "rows", "expected", "ordered"),
    [
        (True, False, None, ["masked"], []),
        (False, True, None, ["masked", "masked"], []),  # and its gradient
        (False, False, None, ["unmasked"], ["masked"]),
        (False, False, 40_000, ["unmasked"], ["masked"]),
        (False, False, 400_000, ["masked"], []),
        (True, True, 848, ["masked", "masked"], []),
    ],
)
def test_the_dataflow_of_the_rule_is_compiled(monkeypatch, symmetric, trains, rows, expected, ordered):
    """Rows decide between two of them; they are guessed where nobody knows them yet."""
    flows, target = [], Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
    real = product_kernels.launch_over

    def noting(flow, *args):
        flows.append(flow.name)
        return real(flow, *args)

    monkeypatch.setattr(product_kernels, "launch_over", noting)
    weight = torch.empty(80, 27, 48, dtype=HALF)
    sizes = None if rows is None else product_kernels.Sizes(rows, rows)
    one = product_kernels.Expected(None, weight, "ovi", Epilogue(), 1, symmetric, trains, sizes=sizes)
    given = CPU, dataclasses.replace(target, raw=False), one, HALF, product_kernels.likely(one)
    with precompile.dry_run():
        product_kernels.compile_product(*given)
        assert flows == expected
        flows.clear()
        product_kernels.compile_product(*given, ordered=True)
    assert flows == ordered


@pytest.mark.parametrize("columns", [16, 32, 80, 128, 256])
@pytest.mark.parametrize("rows", [2_000, 30_000, 130_000])
def test_every_dataflow_between_coordinates_is_guessed(columns, rows):
    """In inference few rows are not ordered and many are."""
    target = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
    weight = torch.empty(columns, 27, columns, dtype=HALF, device="meta")
    one = product_kernels.Expected(None, weight, "ovi", Epilogue())
    layer = LayerProduct(target, CPU, HALF, "ieee", layout_of(weight, "ovi", 1))
    guesses = [*product_kernels.likely(one), *product_kernels.less_likely(one)]
    flows = {product_kernels.flows_over(layer, one, 0, sizes)[0].name for sizes in guesses}
    met = product_kernels.flows_over(layer, one, 0, product_kernels.Sizes(rows, rows))[0].name
    assert met in flows


def test_layers_that_cannot_be_described_do_no_harm(spconv, monkeypatch, caplog):
    def broken(module):
        raise AttributeError("no weight")

    compilation.expect(torch.nn.ReLU(), broken)
    layer = torch.nn.ReLU()
    compilation.expect(layer, broken)
    monkeypatch.setattr(compilation, "MapKernels", lambda *_: None)
    target = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
    with caplog.at_level("DEBUG", "sparse_bridge"):
        compilation.compile_first(torch.device("cuda", 7), target, False)
    assert "no weight" in caplog.text


def forms():
    """What is compiled, with what the numbers in its keys stand for."""
    meaning = {number: key for key, number in launch.numbers().items()}

    def told(key):
        return tuple(map(told, key)) if isinstance(key, tuple) else meaning.get(key, key)

    compiled = ((kernel.name, key) for kernel in launch.REGISTRY.values() for key in kernel._compiled)
    return {(name, device, *(map(told, key) if isinstance(key, tuple) else (key,))) for name, (device, key) in compiled}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20_000, 60_000])
@pytest.mark.parametrize("trains", [False, True])
def test_a_network_meets_no_kernel_that_is_not_on_its_way(spconv, rows, trains):
    where = torch.device("cuda", 0)
    assert catalogue.DECLARATIONS  # every kernel is imported, and those are waited for as well
    torch.manual_seed(0)
    compilation.reset()
    device_support.reset()
    network = encoder().to(where).train(trains)
    network = network if trains else network.half()
    shape = (41, 400, 400)
    cells = torch.randperm(41 * 400 * 400)[:rows]
    coords = torch.stack([cells * 0, cells // 160_000, cells // 400 % 400, cells % 400], 1).int()
    x = torch.randn(rows, 4, device=where, dtype=torch.float32 if trains else HALF)
    before = {kernel: kernel._compiled for kernel in launch.REGISTRY.values()}
    for kernel in before:
        kernel._compiled, kernel._coming = {}, {}
    learnt.forget()
    self_check.reset()
    try:
        # Winners of the tuner are for one size; the rule is the same for all that are not small.
        with (
            settings.override(tune="off"),
            torch.set_grad_enabled(trains),
            torch.autocast("cuda", HALF, enabled=trains),
        ):
            target = device_support.kernel_target(where)
            coming = [run for kernel in before for run in kernel._coming.values()]
            for run in coming:
                assert run.cancelled() or run.exception(60) is None
            expected = forms()
            y = network(spconv.SparseConvTensor(x, coords.to(where), list(shape), 1))
            if trains:
                y.float().square().mean().backward()
        torch.cuda.synchronize()
        assert target is not None and len(expected) > 15
        assert forms() - expected == set()
    finally:
        for kernel, compiled in before.items():
            kernel._compiled = compiled
