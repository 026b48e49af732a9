"""Activation checkpoints: maps are built once, and selective ones keep what they are told to."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_bridge.compile
from sparse_bridge.core.maps import map_builder
from tests.compile.comparison import compare_gradients, compare_statistics, gradients
from tests.compile.programs import PROGRAMS, scene
from tests.releases import since

ops = torch.ops.sparse_bridge


@pytest.fixture
def built(monkeypatch):
    """The kinds of the maps that were built."""
    kinds = []

    def counted(kind):
        build = getattr(map_builder, kind)

        def run(*given, **more):
            kinds.append(kind)
            return build(*given, **more)

        monkeypatch.setattr(map_builder, kind, run)

    for kind in ("submanifold", "strided", "between"):
        counted(kind)
    return kinds


class Recorder(TorchDispatchMode):
    """Counts the operators of the package."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "sparse_bridge":
            self.calls.append(function._opname)
        return function(*args, **(kwargs or {}))


def step(program, number, run):
    y = run(*scene(number))
    y.square().mean().backward()


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("api", ("spconv", "torchsparse", "minkowski"))
def test_eager_checkpoints_build_no_map_twice(api, reentrant, built, plain_settings):
    with PROGRAMS[api]() as programs:
        program = programs["three"]().train()
        twin = copy.deepcopy(program)
        tensor = program._wrap(*scene(0))
        program.network(tensor)
        once = len(built)
        features, coords = scene(1)
        features.requires_grad_()
        x = program._wrap(features, coords)
        built.clear()

        def run(anchor, x=x):
            return program._read(program.network(x))

        y = checkpoints.checkpoint(run, features, use_reentrant=reentrant)
        y.square().mean().backward()
        assert len(built) == once
        step(twin, 1, twin)
        step(twin, 1, twin)  # statistics move at both passes
        for p in twin.parameters():
            p.grad /= 2
        for mine, theirs in zip(program.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@since(2, 5, "checkpoints are not selective")
def test_selective_checkpoints_keep_products_by_name(built, plain_settings):
    context = functools.partial(
        checkpoints.create_selective_checkpoint_contexts, sparse_bridge.compile.policy(ops.conv.default)
    )
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().train()
        twin = copy.deepcopy(program)
        with Recorder() as recorded:
            y = checkpoints.checkpoint(program, *scene(0), use_reentrant=False, context_fn=context)
            assert recorded.calls == ["conv"] * 3
            y.square().mean().backward()
        # The outer mode sees what is computed again: nothing that was kept.
        assert recorded.calls.count("conv") == 3
        assert recorded.calls.count("conv_backward") == 3
        step(twin, 0, twin)
        for mine, theirs in zip(program.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@since(2, 9, "norms count a checkpoint in a graph twice")
@pytest.mark.parametrize("keep", (False, True))
def test_checkpoints_inside_of_a_graph(keep, built, plain_settings):
    policy = sparse_bridge.compile.policy(*[ops.conv.default] * keep)
    context = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().train()
        twin = copy.deepcopy(program)

        def run(features, coords):
            return checkpoints.checkpoint(program, features, coords, use_reentrant=False, context_fn=context)

        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        step(twin, 0, twin)
        once = len(built)
        built.clear()
        step(program, 0, compiled)
        assert len(built) == once
        compare_gradients(gradients(program), gradients(twin))
        compare_statistics(program, twin)
