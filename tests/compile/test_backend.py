"""`torch.compile(model, backend="sparse_bridge")`: the eager bits, from few steps."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import sparse_bridge.compile
from sparse_bridge.core.compile import norms
from sparse_bridge.core.compile.programs import backend as backends
from tests.compile.comparison import compare
from tests.compile.programs import DOORS, GRID, PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


@pytest.fixture
def lowered(monkeypatch):
    """By graph, how often it calls what."""
    graphs = []
    own = backends.lower

    def lower(graph):
        own(graph)
        calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        graphs.append(Counter(getattr(node.target, "__name__", node.target) for node in calls))

    monkeypatch.setattr(backends, "lower", lower)
    return graphs


def assert_bits(program, scenes=4):
    """Compiled and eager results are equal, bit for bit."""
    twin = copy.deepcopy(program)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
    for number in range(scenes):
        given = scene(number)
        assert torch.equal(compiled(*given), twin(*given)), number


@pytest.mark.sample(1)
@pytest.mark.parametrize("door", quick(["spconv", "torchsparse", "minkowski"], DOORS))
def test_inference_has_the_eager_bits(door, plain_settings, lowered):
    with PROGRAMS[door]() as programs, torch.no_grad():
        assert_bits(programs["three"]().eval())
    last = lowered[-1]
    assert last["chain"] == 1 and not last["conv"]
    assert not [name for name in last if "batch_norm" in str(name) or "relu" in str(name)]


@pytest.mark.slow
def test_a_network_is_a_few_steps(plain_settings, lowered):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        compare(programs["unet"]().eval(), "sparse_bridge", 3)  # torch's products have other bits
    assert len(lowered) == 2  # one scene, and any
    last = lowered[-1]
    assert last["maps"] == 1 and 0 < last["chain"] <= 5 and not last["map_over"]
    assert not [name for name in last if "_tensor_version" in str(name)]


@pytest.mark.parametrize("door", quick(["spconv"], DOORS))
def test_training(door, plain_settings, rules, lowered):
    """With norms as operators, as on GPUs; statistics move together."""
    rules.set(norms, DEVICES=("cpu",))
    with PROGRAMS[door]() as programs:
        compare(programs["three"]().train(), "sparse_bridge", 3)
    assert any(graph["move_averages"] == 1 and graph["count"] == 1 for graph in lowered)


class ByHand(nn.Module):
    """A layer, its norm and ReLU, called one by one, a ReLU by the name of its argument; a norm
    that somebody else reads, too."""

    def __init__(self, sp):
        super().__init__()
        self.conv, self.last = sp.SubMConv3d(4, 8, 3, bias=False), sp.SubMConv3d(8, 8, 3)
        self.norm, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)

    def forward(self, features, coords):
        import spconv.pytorch as sp

        x = self.conv(sp.SparseConvTensor(features, coords, list(GRID), 2))
        x = self.last(x.replace_feature(torch.relu(self.norm(x.features))))
        y = self.other(x.features)
        z = torch.relu(input=self.other(self.last(x).features))
        return torch.relu(y) + y + z


@pytest.mark.slow
def test_norms_that_are_called_by_hand(plain_settings, rules, lowered):
    rules.set(norms, DEVICES=("cpu",))
    with PROGRAMS["spconv"]():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        compare(ByHand(sp).train(), "sparse_bridge", 3)
    calls = lowered[-2]  # the forward pass of the last
    assert calls["_forward"] == 3
    assert not [name for name in calls if "native_batch_norm" in str(name)]


@pytest.mark.slow
def test_gradients_under_autocast_are_those_of_eager_layers(plain_settings):
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().train()
        twin = copy.deepcopy(program)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for number in range(2):
            for run in (compiled, twin):
                with torch.autocast("cpu", torch.bfloat16):
                    y = run(*scene(number))
                y.float().square().mean().backward()
        pairs = zip(program.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


class InPlace(nn.Module):
    """Writes over features that somebody else reads, and over coordinates' neighbours."""

    def __init__(self, sp):
        super().__init__()
        self.first = sp.SubMConv3d(4, 8, 3, indice_key="a")
        self.second = sp.SubMConv3d(8, 8, 3, indice_key="a")

    def forward(self, features, coords):
        import spconv.pytorch as sp

        x = self.first(sp.SparseConvTensor(features, coords, list(GRID), 2))
        kept = x.features
        before = kept.sum()
        kept.relu_()
        y = self.second(x.replace_feature(kept))
        made = y.features
        made += kept
        made[0] = before
        return made


def test_writes_are_seen(plain_settings, lowered):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        assert_bits(InPlace(sp).eval(), 3)
    assert lowered and not any("relu_" in str(name) for name in lowered[-1])


class State(nn.Module):
    """Reads its inputs, weights and buffers, and changes them later."""

    def __init__(self, sp):
        super().__init__()
        self.first = sp.SubMConv3d(4, 8, 3, indice_key="a")
        self.second = sp.SubMConv3d(8, 8, 3, indice_key="a")
        for number, name in enumerate(("slow", "fast", "steps")):
            self.register_buffer(name, torch.full((4,), 1.0 + number))

    def forward(self, features, coords):
        import spconv.pytorch as sp

        x = self.first(sp.SparseConvTensor(features, coords, list(GRID), 2))
        features.mul_(2)
        y = self.second(x).features * self.steps.sum()
        self.second.weight.mul_(0.9)
        self.slow.mul_(0.9).add_(self.fast, alpha=0.1)
        self.fast.mul_(0.9).add_(features.mean(0), alpha=0.1)
        self.steps += 1
        return y


def test_what_is_written_last_is_read_before(plain_settings):
    """Also where two averages move that read each other."""
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        program = State(sp).eval()
        twin = copy.deepcopy(program)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for number in range(3):
            mine, theirs = scene(number), scene(number)
            assert torch.equal(compiled(*mine), twin(*theirs))
            assert torch.equal(mine[0], theirs[0])
            for one, other in zip(program.buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


class Noise(nn.Module):
    """Random numbers behind a layer, and such that no layer precedes."""

    def __init__(self, sp, drop):
        super().__init__()
        self.conv, self.drop = sp.SubMConv3d(4, 8, 3), drop

    def forward(self, features, coords):
        import spconv.pytorch as sp

        y = self.conv(sp.SparseConvTensor(features, coords, list(GRID), 2)).features
        return self.drop(y) + torch.rand_like(features[:, :1])


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.Dropout1d(0.5)], ids=["alone", "columns"])
def test_random_numbers_keep_their_order(plain_settings, drop):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        program = Noise(sp, drop).train()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for number in range(3):
            results = []
            for run in (compiled, program):
                torch.manual_seed(number)
                results.append(run(*scene(number)))
            assert torch.equal(*results)


class Wide(nn.Module):
    """One product that autocast leaves alone."""

    def __init__(self, sp):
        super().__init__()
        self.conv, self.head = sp.SubMConv3d(4, 8, 3), nn.Linear(8, 8)

    def forward(self, features, coords):
        import spconv.pytorch as sp

        y = self.conv(sp.SparseConvTensor(features, coords, list(GRID), 2)).features
        with torch.autocast("cpu", enabled=False):
            return self.head(y.float())


def test_a_region_without_autocast(plain_settings):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        program = Wide(sp).eval()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                mine, theirs = compiled(*scene(number)), program(*scene(number))
            assert mine.dtype == torch.float32 and torch.equal(mine, theirs)


def test_eager_layers_go_on_with_what_a_program_made(plain_settings):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        down = sp.SparseConv3d(4, 8, 3, stride=2, padding=1, indice_key="down").eval()
        inner = sp.SubMConv3d(8, 8, 3, indice_key="sub").eval()
        up = sp.SparseInverseConv3d(8, 4, 3, indice_key="down").eval()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: inner(down(x)), backend="sparse_bridge", fullgraph=True)
        for number in range(3):
            features, coords = scene(number)
            x = sp.SparseConvTensor(features, coords, list(GRID), 2)
            y = up(compiled(x))
            want = up(inner(down(sp.SparseConvTensor(features, coords, list(GRID), 2))))
            assert torch.equal(y.features, want.features)
            assert torch.equal(y.indices, want.indices)


def test_new_weights_and_settings_count(plain_settings):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        twin = copy.deepcopy(program)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for change in (None, lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data.clone())):
            for one in (program, twin):
                for parameter in one.parameters() if change else ():
                    change(parameter)
            for dataflow in ("auto", "per_offset"):
                with sparse_bridge.settings.override(dataflow=dataflow):
                    assert torch.equal(compiled(*scene(1)), twin(*scene(1)))


@pytest.mark.slow
def test_too_few_rows_are_refused(plain_settings):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True)
        for number in range(2):
            compiled(*scene(number))
        features, coords = scene(0)
        with pytest.raises(sparse_bridge.errors.SparseBridgeError, match="rows"):
            compiled(features[:0], coords[:0])


@pytest.mark.slow
def test_sizes_that_vary_from_the_first_scene_on(plain_settings, lowered):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        twin = copy.deepcopy(program)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="sparse_bridge", fullgraph=True, dynamic=True)
        for number in range(3):
            assert torch.equal(compiled(*scene(number)), twin(*scene(number)))
    assert len(lowered) == 1


@pytest.mark.parametrize("backend", ["sparse_bridge", "aot_eager"])
def test_what_is_written_to_a_result_stays_out_of_the_next(plain_settings, backend):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        layers = sp.SparseSequential(sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2, 1), sp.SparseConv3d(8, 4, 1))

        def program(features, coords):
            y = layers(sp.SparseConvTensor(features, coords, list(GRID), 2))
            return y.features, y.indices

        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        features, coords = scene(1)
        for _ in range(3):
            made = compiled(features, coords)
            want = program(features, coords.clone())
            assert all(map(torch.equal, made, want))
            made[1][:, 1:] += 5


@pytest.mark.parametrize("backend", ["sparse_bridge", "aot_eager"])
def test_gradients_under_a_memory_limit_are_refused(plain_settings, backend):
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().train()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        compiled(*scene(1)).sum().backward()
        with sparse_bridge.memory_limit("1GiB"):
            y = compiled(*scene(1))
            with pytest.raises(sparse_bridge.errors.UnsupportedError, match="checkpoint"):
                y.sum().backward()
