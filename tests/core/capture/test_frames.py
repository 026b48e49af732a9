"""Which local variables a function under way still computes with."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls import frames

from . import apis
from .graph_sizes import graphs_of

CALLER = None


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


@pytest.mark.parametrize(
    "program",
    [one_statement, with_keyword, with_calls_around, with_stars, behind_a_check, behind_an_assertion, in_a_block],
)
def test_what_was_used_already(program):
    assert program(1, (2, 3)) == []


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
        of_an_attribute,
    ],
)
def test_what_is_still_to_be_used(program):
    assert "shape" in program(1, torch.Size((2, 3)) if program is not of_an_attribute else 4)[-8:]


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
