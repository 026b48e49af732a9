"""Compiled models behind eager calls of the same layers, which know what followed them, and on
tensors whose features wait."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import utils

from sparse_bridge.core.conv import convolution
from sparse_bridge.core.device.torch_compat import WHOLE_GRAPHS as TRACED
from sparse_bridge.core.device.torch_compat import eagerly
from tests.checks import assert_close
from tests.compile.programs import APIS, PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS
from tests.rules import layers_deferred

MODES = ("eval", "train", pytest.param("gradients", marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def all_wait(rules, plain_settings):
    """Layers of any size wait for what follows them."""
    rules.hold(layers_deferred())


@pytest.fixture
def quiet(monkeypatch):
    """No warning names a file of ours."""
    utils.warn_once_cache.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    ours = [str(one.message) for one in seen if "sparse_bridge" in f"{one.message} {one.filename}"]
    assert not ours, ours


class Layers(nn.Module):
    """Layers of any framework one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            if hasattr(x, "replace_feature") and type(layer).__module__.startswith("torch."):
                x = x.replace_feature(layer(x.features))
            else:
                x = layer(x)
        return x


class Check:
    """Calls of a program give what it gives eagerly, gradients too."""

    def __init__(self, program, mode):
        for layer in program.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.momentum = 0.0
            if type(layer).__name__ in ("ReLU", "MinkowskiReLU"):
                getattr(layer, "module", layer).inplace = True
        self.program, self.mode = program.train(mode == "train"), mode
        for _ in range(3):  # until it is known what follows
            self.want, self.grads = self.run(lambda: program(*scene(0)))

    def run(self, call):
        with torch.set_grad_enabled(self.mode != "eval"):
            y, grads = call(), []
            if self.mode != "eval":
                self.program.zero_grad()
                y.square().sum().backward()
                grads = [one.grad.clone() for one in self.program.parameters()]
            return y, grads

    def same(self, call, times=2):
        for _ in range(times):
            y, grads = self.run(call)
            assert_close(y, self.want.double())
            for found, expected in zip(grads, self.grads, strict=True):
                assert_close(found, expected.double())


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("api", quick(["spconv", "minkowski"], APIS))
def test_the_same_model_compiled(api, mode, quiet):
    with PROGRAMS[api]() as programs:
        check = Check(programs["three"](), mode)
        program = check.program
        network, read = program.network, program._read
        compiled = torch.compile(network, backend="aot_eager")
        with torch.set_grad_enabled(mode != "eval"):
            used = program._wrap(*scene(0))
            network(used)  # which has maps now
        check.same(lambda: read(compiled(used)))
        check.same(lambda: read(compiled(program._wrap(*scene(0)))))
        check.same(lambda: program(*scene(0)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("api", quick(["torchsparse"], APIS))
def test_models_that_are_compiled_in_parts(api, mode, quiet):
    with PROGRAMS[api]() as programs:
        check = Check(programs["three"](), mode)
        program = check.program
        layers = [layer for unit in program.network for layer in unit]

        def compiled(part):
            return torch.compile(Layers(part), backend="aot_eager")

        def call(first, last):
            return lambda: program._read(last(first(program._wrap(*scene(0)))))

        for at in (1, 2):  # between a convolution and its norm, and behind that
            first, last = layers[:at], layers[at:]
            check.same(call(Layers(first), compiled(last)))
            check.same(call(compiled(first), Layers(last)))
        check.same(lambda: program(*scene(0)))


@pytest.mark.parametrize("backend", quick(["aot_eager"], ("eager", "aot_eager", "inductor")))
def test_results_of_65536_values(backend, rules, quiet):
    """As programs have them: with the size at which layers begin to wait."""
    rules.over()
    with PROGRAMS["minkowski"]():
        import MinkowskiEngine as ME

        def conv(c_in, c_out, size, **more):
            return ME.MinkowskiConvolution(c_in, c_out, size, dimension=3, **more)

        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm = conv(4, 16, 3), ME.MinkowskiBatchNorm(16)
                self.down, self.coarse = conv(16, 32, 2, stride=2), ME.MinkowskiBatchNorm(32)
                up = ME.MinkowskiConvolutionTranspose
                self.up = up(32, 16, 2, 2, dimension=3)
                self.head, self.relu = conv(32, 2, 1), ME.MinkowskiReLU(inplace=True)

            def forward(self, x):
                a = self.relu(self.norm(self.first(x)))
                b = self.relu(self.coarse(self.down(a)))
                return self.head(ME.cat(self.up(b), a))

        network = Network().eval()
        coords = torch.cartesian_prod(torch.arange(2), *[torch.arange(0, 36, 2)] * 3).int()
        features = torch.randn(len(coords), 4)
        assert len(coords) * 16 > max(convolution.MIN_DEFERRED_ELEMENTS)
        compiled = torch.compile(network, backend=backend)
        with torch.no_grad():
            x = ME.SparseTensor(features, coords)
            want = network(x).F.double()
            assert_close(compiled(x).F, want)
            assert_close(compiled(ME.SparseTensor(features, coords)).F, want)


@WHOLE_GRAPHS
@pytest.mark.parametrize("api", ("spconv", "torchsparse", "minkowski"))
def test_whole_graphs_say_what_to_do_about_features_that_wait(api):
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        first, *last = [layer for unit in program.network for layer in unit]
        tail = Layers(last[:2])
        for _ in range(3):
            want = (
                program._read(tail(first(program._wrap(*scene(0)))))
                if api != "spconv"
                else (tail(first(program._wrap(*scene(0)))).features)
            )
        whole = torch.compile(tail, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
            whole(first(program._wrap(*scene(0))))
        if "reason" in torch.compiler.disable.__code__.co_varnames:
            assert "wait for the layer behind them; read" in str(refused.value)
        x = first(program._wrap(*scene(0)))
        name = {"spconv": "features", "torchsparse": "feats", "minkowski": "F"}[api]
        if api == "spconv":
            x = x.replace_feature(x.features + 0)
        else:
            getattr(x, name)
        assert_close(getattr(whole(x), name), want.double())


@pytest.mark.skipif(not TRACED, reason="before torch 2.8 layers run between graphs")
def test_marked_functions_run_as_they_are_between_graphs():
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @eagerly
    def outer(x):
        return inner(x)

    for function in (inner, outer):  # unmarked, it is compiled by itself
        seen.clear()
        again = torch._dynamo.disable(lambda x, function=function: function(x), recursive=False)
        torch.compile(lambda x, again=again: again(x), backend="eager")(torch.ones(1))
        assert seen == [function is inner]


@pytest.mark.slow
def test_an_activation_at_the_top_of_a_script(tmp_path):
    """Who is called is looked for among the callers, of which there are few."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, sparse_bridge\n"
        "from sparse_bridge.core.conv import convolution\n"
        "convolution.MIN_DEFERRED_ELEMENTS = [0, 0]\n"
        "sparse_bridge.enable('spconv', mode='standin')\n"
        "import spconv.pytorch as sp\n"
        "torch.set_grad_enabled(False)\n"
        "conv, norm = sp.SubMConv3d(4, 8, 3), torch.nn.BatchNorm1d(8).eval()\n"
        "cells = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]]).int()\n"
        "for _ in range(4):\n"
        "    x = conv(sp.SparseConvTensor(torch.ones(2, 4), cells, [8, 8, 8], 1))\n"
        "    y = torch.relu(norm(x.features))\n"
        "print(tuple(y.shape))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "(2, 8)\n", done.stderr
