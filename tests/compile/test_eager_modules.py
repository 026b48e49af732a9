"""`torch.compile` where graphs may break: the outermost sparse module is one eager call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import hooks
from sparse_bridge.adapters.enabling import compiling
from tests.adapters.spconv.apis import without_wheel
from tests.compile.comparison import assert_same, gradients
from tests.compile.programs import PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


class Graphs:
    """A backend that keeps what it is given, and runs it."""

    def __init__(self):
        torch._dynamo.reset()
        self.made = []

    def __call__(self, graph, inputs):
        self.made.append(graph)
        return graph.forward

    def calls(self, part):
        return sum(part in str(node.target) for graph in self.made for node in graph.graph.nodes)


class Detector(nn.Module):
    """A sparse backbone from plain tensors, and a dense head."""

    def __init__(self, program, channels):
        super().__init__()
        self.backbone, self._wrap, self._read = program.network, program._wrap, program._read
        self.head = nn.Sequential(nn.Linear(channels, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, features, coords):
        return self.head(self._read(self.backbone(self._wrap(features, coords))))


class Watched(nn.Module):
    """A module around another that notes whether it is traced."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.traced = inner, []

    def forward(self, x):
        self.traced.append(hooks.traced())
        return self.inner(x)


def check(model, compiled, made, training, scenes=4):
    """Compiled and eager agree, in gradients and statistics, too; graphs after each scene."""
    twin, counts = copy.deepcopy(model), []
    with torch.set_grad_enabled(training):
        for number in range(scenes):
            y, expected = compiled(*scene(number)), twin(*scene(number))
            assert_same(y, expected)
            if training:
                y.square().mean().backward()
                expected.square().mean().backward()
            for mine, theirs in zip(
                (*gradients(model), *model.buffers()), (*gradients(twin), *twin.buffers()), strict=True
            ):
                assert_same(mine, theirs)
            counts.append(len(made.made))
    assert len(set(counts[1:])) == 1, counts
    return counts[-1]


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("api", quick(["spconv"], PROGRAMS))
def test_a_network_is_one_call(api, training, plain_settings):
    with PROGRAMS[api]() as programs:
        program = programs["unet"]().train(training)
        program.network = watched = Watched(program.network)
        made = Graphs()
        assert check(program, torch.compile(program, backend=made), made, training) == 0
        made = Graphs()
        network = torch.compile(program.network, backend=made)

        def outside(features, coords):
            return program._read(network(program._wrap(features, coords)))

        assert check(program, outside, made, training) == 0
        assert watched.traced and not any(watched.traced)


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("api", quick(["minkowski"], PROGRAMS))
def test_a_dense_head_is_compiled(api, training, plain_settings):
    with PROGRAMS[api]() as programs:
        model, made = Detector(programs["unet"](), 5).train(training), Graphs()
        assert 2 <= check(model, torch.compile(model, backend=made), made, training) <= 4
        assert made.calls("linear") == 4 and not made.calls("sparse_bridge")  # for the first scene, and for all others


@pytest.mark.parametrize("how", ("function", "method", "part", "dynamic"))
def test_ways_to_compile(how, plain_settings):
    with PROGRAMS["spconv"]() as programs:
        model, made = Detector(programs["three"](), 3).eval(), Graphs()
        model.head, run = nn.Conv3d(6, 3, 1), model
        if how == "function":

            @torch.compile(backend=made)
            def run(features, coords):
                return model(features, coords).relu() + 1

            model_of = lambda features, coords: twin(features, coords).relu() + 1  # noqa: E731
        elif how == "method":
            model.compile(backend=made)
        elif how == "part":
            model.backbone = torch.compile(model.backbone, backend=made)
        else:
            run = torch.compile(model, backend=made, dynamic=True)
        twin = Detector(programs["three"](), 3).eval()
        twin.head = nn.Conv3d(6, 3, 1)
        twin.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()})
        expected, counts = (model_of if how == "function" else twin), []
        with torch.no_grad():
            for number in range(3):
                assert_same(run(*scene(number)), expected(*scene(number)))
                counts.append(len(made.made))
        assert counts[0] == counts[-1] and (counts[0] == 0) == (how == "part"), counts
        assert not made.calls("sparse_bridge") and bool(made.calls("conv3d")) == (how != "part")


@pytest.mark.slow
def test_whole_graphs_are_traced_before_and_after(plain_settings):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        made, whole = Graphs(), Graphs()
        one, parts = torch.compile(program, backend=whole, fullgraph=True), torch.compile(program, backend=made)
        for run in (one, parts, one, parts):
            assert_same(run(*scene(0)), program(*scene(0)))
        assert_same(one(*scene(1)), program(*scene(1)))
        assert not made.made and len(whole.made) == 2 and whole.calls("sparse_bridge") >= 6


def test_modules_that_call_functions(plain_settings):
    """FlexGEMM has functions: a module's class is known once one of them has been met in it."""
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        class Conv(nn.Module):
            def __init__(self, channels):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(channels, 3, 3, 3, channels) / 10)

            def forward(self, feats, coords, cache):
                return sparse_submanifold_conv3d(
                    feats, coords, (2, len(self.weight), 32, 32, 32), self.weight, None, cache
                )

        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.layers = nn.Linear(4, 6), nn.ModuleList(Conv(6) for _ in range(3))

            def forward(self, feats, coords):
                x, cache = self.stem(feats), None
                for layer in self.layers:
                    x, cache = layer(x.relu(), coords, cache)
                return x

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.network, self.head = Network(), nn.Linear(6, 2)

            def forward(self, feats, coords):
                return self.head(self.network(feats, coords))

        network, made = Network(), Graphs()
        assert check(network, torch.compile(network, backend=made), made, True) == 0
        whole, made = Whole(), Graphs()
        assert check(whole, torch.compile(whole, backend=made), made, True) == 2 and made.calls("linear") == 2


def test_which_modules_are_one_call():
    with PROGRAMS["spconv"]():
        import spconv.pytorch as sp

        def conv():
            return sp.SubMConv3d(4, 4, 3)

        class Block(sp.SparseModule):
            def __init__(self, *dense):
                super().__init__()
                self.first, self.second, self.dense = conv(), conv(), nn.Sequential(*dense)

        def dense(count):
            return [nn.Linear(4, 4) for _ in range(count)]

        layers = sp.SparseSequential(conv(), nn.BatchNorm1d(4), nn.Conv3d(4, 4, 1))
        for module, one in (
            (conv(), True),
            (layers, True),
            (nn.Sequential(layers), True),
            (nn.Sequential(nn.Sequential(layers), nn.Linear(4, 4)), False),
            (nn.Sequential(layers, sp.ToDense(), nn.Conv3d(4, 4, 1)), False),
            (nn.Sequential(*dense(3)), False),
            (nn.Sequential(conv(), nn.BatchNorm1d(4), conv(), *dense(2)), True),
            (nn.Sequential(conv(), nn.BatchNorm1d(4), conv(), *dense(3)), False),
            (Block(*dense(2)), True),  # a squeeze and an excitation
            (nn.Sequential(*(Block(*dense(2)) for _ in range(5)), nn.Linear(4, 4)), True),
        ):
            assert compiling.is_sparse(module) == one, module


def test_the_compiler_is_put_back():
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    def patched():
        return [CatchErrorsWrapper.__dict__["__call__"], InliningInstructionTranslator.__dict__["inline_call"]]

    before = patched()
    with (
        without_wheel(),  # it may have been imported by another test
        sparse_bridge.enable("spconv", mode="standin"),
        sparse_bridge.enable("torchsparse", mode="standin"),
        sparse_bridge.enable("minkowski", mode="standin"),
    ):
        during = patched()
    assert before == patched() and not any(map(lambda a, b: a is b, before, during))


def test_modules_that_a_compiled_function_makes(plain_settings):
    """Their `__init__` is a frame of a module that is not one yet; of torch's own modules, too."""

    class Late(torch.nn.Module):
        def __init__(self):
            self.size = 4
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(self.size)

        def forward(self, x):
            return self.norm(x)

    x = torch.randn(5, 4)
    with sparse_bridge.enable("torchsparse", mode="standin"):
        import torchsparse.nn as spnn
        from torchsparse import SparseTensor

        def sparse(features):
            coords = torch.zeros(5, 4, dtype=torch.int32)
            coords[:, 1] = torch.arange(5)
            return spnn.BatchNorm(4)(SparseTensor(features, coords)).F

        torch._dynamo.reset()
        want = torch.nn.BatchNorm1d(4)(x)
        for function in (lambda features: torch.nn.BatchNorm1d(4)(features), lambda features: Late()(features), sparse):
            torch.testing.assert_close(torch.compile(function, backend="eager")(x), want)
