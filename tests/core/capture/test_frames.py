"""Which local variables a function under way still computes with."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls import frames
from sparse_bridge.refusals import Refusal

from . import apis
from .graph_sizes import graphs_of

CALLER = None
CHECKED = []


def made(*args, **kwargs):
    return [*args, *kwargs.values()]


def net(*args, **kwargs):
    frame = sys._getframe(1)
    return [*frames.names_after(frame.f_code, frame.f_lasti)]


def one_statement(feats, shape):
    return net(made(feats, shape))


def with_keyword(feats, shape):
    return net(made(feats, size=shape))


def with_calls_around(feats, shape):
    return made(0, net(made(feats, [shape[0], *shape], f"{shape}")), 1)[1]


def with_stars(feats, shape):
    return net(*made(feats, shape), size=shape)


def behind_a_check(feats, shape):
    if not feats:
        raise ValueError("no features")
    return net(made(feats, shape))


def behind_an_assertion(feats, shape):
    assert feats
    return net(made(feats, shape))


def in_a_block(feats, shape):
    with contextlib.nullcontext():
        return net(made(feats, shape))


def in_a_loop(feats, shape):
    x = made(feats, shape)
    for layer in [net]:
        x = layer(x)
    return x


def in_a_loop_behind_a_check(feats, shape):
    assert feats, shape
    for layer in [net]:
        names = layer(feats)
    return names


def before_another_way(feats, shape):
    if feats:
        return net(made(feats, shape))
    return shape


def before_an_error(feats, shape):
    names = net(made(feats, shape))
    if names is None:
        raise ValueError(f"{shape}")
    assert names is not None, shape
    return names


def before_it_is_written(feats, shape):
    names = net(made(feats, shape))
    shape = names
    return shape


@pytest.mark.parametrize(
    "program",
    [
        one_statement,
        with_keyword,
        with_calls_around,
        with_stars,
        behind_a_check,
        behind_an_assertion,
        in_a_block,
        in_a_loop,
        in_a_loop_behind_a_check,
        before_another_way,
        before_an_error,
        before_it_is_written,
    ],
)
def test_what_was_used_already(program):
    assert "shape" not in program(1, (2, 3))


def argument_before(feats, shape):
    return made(shape, net(made(feats, shape)))[1]


def operand_before(feats, shape):
    return [*shape] + net(made(feats, shape))


def entry_before(feats, shape):
    return {"shape": shape, "out": net(made(feats))}["out"]


def read_later(feats, shape):
    names = net(made(feats, shape))
    return (names, shape)[0]


def read_in_the_next_round(feats, shape):
    for _ in range(1):
        names = net(made(feats, shape))
    return names


def behind_a_jump(feats, shape):
    return made(shape, CALLER or net(made(feats)))[1]


def behind_a_named_value(feats, shape):
    return made(shape, (x := made(feats)), net(x))[2]


def what_a_loop_goes_through(feats, shape):
    for layer in [net, made][: len(shape) - 1]:
        names = layer(feats)
    return names


def read_behind_a_loop(feats, shape):
    for layer in [net]:
        names = layer(feats)
    return (names, shape)[0]


def read_in_any_case(feats, shape):
    try:
        names = net(made(feats))
    finally:
        CHECKED.append(shape)
    return names


def read_by_a_function(feats, shape):
    def later():
        return shape

    names = net(made(feats))
    later()
    return [*names, "shape"] if "later" in names else []


def before_a_handler(feats, shape):
    try:
        names = net(made(feats, shape))
    except ValueError:
        names = shape
    return names


def before_an_error_that_is_caught(feats, shape):
    try:
        names = net(made(feats))
        if names is None:
            raise ValueError(shape)
    except ValueError as error:
        return error.args
    return names


def of_an_attribute(feats, shape):
    return made(shape.real, net(made(feats, shape)))[1]


@pytest.mark.parametrize(
    "program",
    [
        argument_before,
        operand_before,
        entry_before,
        read_later,
        read_in_the_next_round,
        behind_a_jump,
        behind_a_named_value,
        what_a_loop_goes_through,
        read_behind_a_loop,
        read_in_any_case,
        read_by_a_function,
        before_a_handler,
        before_an_error_that_is_caught,
        of_an_attribute,
    ],
)
def test_what_is_still_to_be_used(program):
    assert "shape" in program(1, torch.Size((2, 3)) if program is not of_an_attribute else 4)[-8:]


def constant(value, inputs=(), n_rows=5):
    """The constant of a local variable, as calls are told apart by it."""

    def outermost():
        return between(value)

    def between(held):
        made = innermost()
        return made, held

    def innermost():
        return frames.constants_alive(sys._getframe(), outermost.__code__, {id(one) for one in inputs}, n_rows)

    _, (name, found) = outermost()[0]
    assert name == "held"
    return found


def number(value):
    return lambda: value


def module(width):
    return nn.Linear(width, width)


ONE, OTHER = module(2), module(2)


@pytest.mark.parametrize(
    "one, other",
    [
        (ONE, OTHER),
        ([ONE, OTHER], [OTHER, ONE]),
        (ONE.forward, OTHER.forward),
        (torch.relu, torch.tanh),
        (made, net),
        (number(1), number(2)),
        (lambda x, scale=1: x * scale, lambda x, scale=2: x * scale),
        (torch, sys),
        (nn.ReLU, nn.SiLU),
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2, 3), torch.ones(3, 3)),
        (torch.ones(2, 3), torch.ones(2, 3, 1)),
        (torch.ones(2), torch.ones(2).half()),
        (torch.ones(2), torch.ones(2).requires_grad_()),
        ({"a": ONE}, {"a": OTHER}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_values_that_tell_calls_apart(one, other):
    assert constant(one) == constant(one) != constant(other) and hash(constant(one)) == hash(constant(one))


def test_what_is_the_same_in_every_call():
    assert constant(number(1)) == constant(number(1))  # defined anew
    assert constant(torch.ones(5, 3), n_rows=5) == constant(torch.zeros(7, 3), n_rows=7)
    assert constant(ONE, [ONE]) == constant(ONE, [ONE]) and constant({}, [CHECKED]) == constant({}, [CHECKED])

    def itself(n):
        return itself(n - 1) if n else n

    assert constant(itself) == constant(itself)


class Other:
    def method(self):
        return self


@pytest.mark.parametrize(
    "value", [Other(), Other().method, [].append, {1, 2}], ids=["object", "method", "append", "set"]
)
def test_what_cannot_be_told(value):
    with pytest.raises(Refusal, match="GRAPH_LOCAL"):
        constant(value)


def test_a_key_does_not_keep_a_module():
    kept = module(2)
    gone = weakref.ref(kept)
    found = constant(kept)
    assert found == constant(kept)
    del kept
    gc.collect()
    assert gone() is None and found != constant(module(2)) and hash(found) == hash(found)


class Chosen(nn.Module):
    """Chooses in front of the network what comes behind it."""

    def network(self, feats, coords, shape):
        return self.inner(self.module[0].SparseConvTensor(feats, coords, shape, 2))["out"].features

    def __init__(self, module, inner, way):
        super().__init__()
        self.module, self.inner, self.way = [module], inner, way
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, feats, coords, shape, other):
        number = int(other.shape[1] > 2)
        if self.way == "branch":
            if number:
                return self.network(feats, coords, shape)
            return -self.network(feats, coords, shape)
        head, scale = self.heads[number], other
        if self.way == "function":
            head = (torch.tanh, torch.relu)[number]
        elif self.way == "local function":

            def head(x):
                return x * (number + 1)

        elif self.way == "shape":
            head = None
        x = self.module[0].SparseConvTensor(feats, coords, shape, 2)
        out = self.inner(x)["out"].features
        return out * scale.shape[1] if head is None else head(out)


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("way", ["module", "function", "local function", "shape", "branch"])
def test_what_is_chosen_in_front_of_the_network(device, rules, way, trains):
    """Late, when replays have gone on for some time."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module, settings.override(optimize="auto"):
        model, plain = (
            Chosen(module, apis.network(module, "spconv", device), way).to(device).train(trains) for _ in "ab"
        )
        for seed in range(18):
            scene = apis.scene(module, "spconv", seed, device, 0.2)
            given = scene.features, scene.indices, scene.spatial_shape, torch.ones(2, 2 + (seed > 10), device=device)
            with torch.set_grad_enabled(trains):
                out = model(*given)
                with settings.override(optimize="off"):
                    torch.testing.assert_close(out, plain(*given))
            if trains:
                out.square().mean().backward()
        assert max(one.hits for one in graph_regions.summary()) >= 6


class Maker(nn.Module):
    """Makes its sparse tensor, and returns one."""

    def __init__(self, module, inner):
        super().__init__()
        self.module, self.inner = [module], inner

    def forward(self, feats, coords, shape):
        return self.inner(self.module[0].SparseConvTensor(feats, coords, shape, 2))["deep"]


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
def test_maps_of_a_result_whose_model_makes_the_tensor(device, rules):
    """It computes once more, from what it was given."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module, settings.override(optimize="auto"), torch.no_grad():
        model = Maker(module, apis.network(module, "spconv", device)).eval()
        for seed in range(8):
            scene = apis.scene(module, "spconv", seed, device, 0.2)
            given = scene.features, scene.indices, scene.spatial_shape
            out = model(*given)
        (said,) = graph_regions.summary()
        assert said.name == "Maker" and said.hits >= 3
        with settings.override(optimize="off"):
            expected = model(*given)
        assert torch.equal(out.indice_dict["d"].indice_pairs, expected.indice_dict["d"].indice_pairs)


class Wrapper(nn.Module):
    """From plain tensors to plain tensors, as a model for DDP: `held` computes with the shape behind the network."""

    def __init__(self, module, inner, held):
        super().__init__()
        self.module, self.inner, self.held = [module], inner, held

    def forward(self, feats, coords, shape):
        if self.held:
            return shape[0], self.inner(self.module[0].SparseConvTensor(feats, coords, shape, 2))["out"].features
        return self.inner(self.module[0].SparseConvTensor(feats, coords, shape, 2))["out"].features


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_grids_of_other_sizes(device, rules, monkeypatch, held, trains):
    """They tell calls apart where the program computes with them: then the network alone is replayed."""
    rules.hold(graphs_of(512, watched=True))
    monkeypatch.setattr(policy, "CALL_KINDS", 5)
    with apis.standin("spconv") as module, settings.override(optimize="auto"):
        model = Wrapper(module, apis.network(module, "spconv", device), held).train(trains)
        plain = Wrapper(module, apis.network(module, "spconv", device), held).train(trains)
        plain.load_state_dict(model.state_dict())
        for seed in range(16):
            scene = apis.scene(module, "spconv", seed, device, 0.2)
            given = scene.features, scene.indices, [size + seed % 7 for size in scene.spatial_shape]
            with torch.set_grad_enabled(trains):
                out = model(*given)
                with settings.override(optimize="off"):
                    expected = plain(*given)
            if held:
                assert out[0] == expected[0]
                out, expected = out[1], expected[1]
            assert torch.equal(out, expected)
            if trains:
                out.square().mean().backward()
        said = {one.name: one for one in graph_regions.summary()}
    served = said[type(model.inner).__name__ if held else "Wrapper"]
    assert served.hits >= (4 if held else 9), said
    assert not held or "GRAPH_NEW_KINDS" in said["Wrapper"].reason
