"""`sparse_bridge.checkpoint` over the tensors of all frameworks: the same gradients to the bit,
maps that are built once, statistics that move once."""

from __future__ import annotations

import contextlib
import copy
import io
import weakref

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.maps import map_builder
from sparse_bridge.errors import DataTypeError
from tests.compile.programs import PROGRAMS, scene

APIS = ("spconv", "torchsparse", "minkowski")


class FlexBlock(nn.Module):
    """Of FlexGEMM, whose functions know no tensor of their own."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 3, 3, 3, 4) / 10 for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, features, coords):
        from flex_gemm.ops import spconv

        cache = None
        for weight in self.weights:
            features, cache = spconv.sparse_submanifold_conv3d(
                features, coords, torch.Size((2, 4, 32, 32, 32)), weight, None, cache
            )
            features = self.norm(features).relu()
        return features


class Level(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, features, coords):
        return self.block(features, coords)


@contextlib.contextmanager
def program_of(api):
    """A program whose `network` or `block` is a level."""
    torch.manual_seed(0)
    if api != "flex_gemm":
        with PROGRAMS[api]() as programs:
            yield programs["three"]().train()
        return
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        yield Level(FlexBlock()).train()


def level_of(program):
    return getattr(program, "network", None) or program.block


@pytest.fixture
def built(monkeypatch):
    """Weak references to the rulebooks that are built."""
    made = []

    def watched(name):
        build = getattr(map_builder, name)

        def run(*given, **more):
            found = build(*given, **more)
            made.append(weakref.ref((found[1] if isinstance(found, tuple) else found).rulebook))
            return found

        monkeypatch.setattr(map_builder, name, run)

    for name in ("submanifold", "strided", "generative", "between"):
        watched(name)
    return made


def step(program, number=0, passes=1):
    """(result, gradients of the features and all parameters) of a training step."""
    program.zero_grad()
    features, coords = scene(number)
    features.requires_grad_()
    torch.manual_seed(7)
    y = program(features, coords)
    loss = y.square().mean()
    for _ in range(passes):
        loss.backward(retain_graph=passes > 1)
    return y, [features.grad, *(one.grad for one in program.parameters())]


def assert_equal(ours, others):
    for mine, other in zip(ours, others, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("passes", (1, 2))
@pytest.mark.parametrize("api", (*APIS, "flex_gemm"))
def test_gradients_maps_and_statistics(api, passes, built, plain_settings):
    with program_of(api) as program:
        clone = copy.deepcopy(program)
        assert sparse_bridge.checkpoint(level_of(program)) is level_of(program)
        wanted, gradients = step(clone, passes=passes)
        count = len(built)
        assert count > 0
        y, found = step(program, passes=passes)
        assert len(built) == 2 * count, "the second pass built maps again"
        assert torch.equal(y, wanted)
        assert_equal(found, gradients)
        assert_equal(program.buffers(), clone.buffers())
        before = [one.clone() for one in program.buffers()]
        assert any(one.item() for one in program.buffers() if one.ndim == 0), "norms count passes"
        with torch.no_grad():
            assert torch.equal(program.eval()(*scene(1)), clone.eval()(*scene(1)))
        assert_equal(program.buffers(), before)


@pytest.mark.parametrize("api", (*APIS, "flex_gemm"))
def test_maps_go_with_the_graph(api, built, plain_settings):
    with program_of(api) as program:
        sparse_bridge.checkpoint(level_of(program))
        y, _ = step(program)
        del y
        assert built and not any(one() is not None for one in built)


def test_what_is_kept(plain_settings):
    """Activations go, and a level's input stays."""
    with program_of("spconv") as program:
        sizes = []
        for run in (copy.deepcopy(program), program):
            if run is program:
                sparse_bridge.checkpoint(run.network)
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one, kept=kept: kept.append(one.nbytes) or one, lambda one: one
            ):
                run(*scene(0))
            sizes.append(sum(kept))
        assert sizes[1] < sizes[0] / 2


def test_random_numbers_repeat(plain_settings):
    with program_of("spconv") as program:
        import spconv.pytorch as sp

        program.network = sp.SparseSequential(*program.network, nn.Dropout(0.5))
        clone = copy.deepcopy(program)
        sparse_bridge.checkpoint(program.network)
        assert_equal(step(program)[1], step(clone)[1])


def test_names_copies_and_pickles(plain_settings):
    with program_of("spconv") as program:
        names = list(program.state_dict())
        level = sparse_bridge.checkpoint(sparse_bridge.checkpoint(program.network))
        assert list(program.state_dict()) == names
        other = copy.deepcopy(program)
        with torch.no_grad():
            other.network[0][0].weight.zero_()
        want = step(program)[1]
        assert not torch.equal(step(other)[1][0], want[0]), "a copy runs its own parameters"
        assert other.network.forward.args[0] is other.network
        file = io.BytesIO()
        torch.save(level, file)
        file.seek(0)
        program.network = torch.load(file, weights_only=False)
        assert_equal(step(program)[1], want)


def test_a_forward_of_the_object_stays(plain_settings):
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x * 2
    x = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(sparse_bridge.checkpoint(layer)(x), x * 2)


def test_levels_inside_of_levels(plain_settings):
    with program_of("minkowski") as program:
        clone = copy.deepcopy(program)
        for level in (*program.network, program.network):
            sparse_bridge.checkpoint(level)
        assert_equal(step(program)[1], step(clone)[1])
        assert_equal(program.buffers(), clone.buffers())


def test_an_error_in_the_second_pass_leaves_statistics_alone(plain_settings):
    with program_of("spconv") as program:
        level, calls = sparse_bridge.checkpoint(program.network), []

        def fail(*_):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("enough")

        level[1].register_forward_pre_hook(fail)
        y = program(*scene(0))
        before = dict(level[0][1]._buffers)
        with pytest.raises(RuntimeError, match="enough"):
            y.sum().backward()
        assert all(level[0][1]._buffers[name] is one for name, one in before.items())


def test_what_is_no_module():
    with pytest.raises(DataTypeError, match=r"got function; expected a torch\.nn\.Module"):
        sparse_bridge.checkpoint(step)


@pytest.mark.parametrize("modules", [nn.ModuleList([nn.ReLU()]), nn.ModuleDict({"a": nn.ReLU()})])
def test_modules_that_are_never_called_are_refused(modules):
    with pytest.raises(DataTypeError, match=r"got a Module(List|Dict).*checkpoint the modules in it"):
        sparse_bridge.checkpoint(modules)
