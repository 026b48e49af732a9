"""A program and its double without replays give the same: results, gradients, buffers, errors."""

from __future__ import annotations

import copy

import torch

import sparse_bridge
from sparse_bridge import settings, tolerances
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from tests.core.capture import apis

from .program import run

HALF = tolerances.of("step", torch.float16).rms  # of statistics, which norms keep in fp32
FACTS = ("spatial_shape", "batch_size", "stride", "spatial_range", "tensor_stride")


def same(mine, theirs):
    assert type(mine) is type(theirs)
    if not isinstance(theirs, torch.Tensor):
        framework = protocol.of(theirs)
        for name in FACTS:
            assert getattr(mine, name, None) == getattr(theirs, name, None), name
        one, other = framework.coordinates_of(mine), framework.coordinates_of(theirs)
        assert torch.equal(one, other), f"coordinates: {tuple(one.shape)}, not {tuple(other.shape)}"
        mine, theirs = framework.features_of(mine), framework.features_of(theirs)
    assert mine.dtype == theirs.dtype and mine.requires_grad == theirs.requires_grad
    mine, theirs = mine.detach(), theirs.detach()
    if not theirs.numel():
        assert mine.shape == theirs.shape
        return
    scale = 1 + float(theirs.abs().nan_to_num(posinf=0).max())
    if theirs.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
        return
    limit = tolerances.of("step", theirs.dtype).rms
    torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit * scale, equal_nan=True)


def attempt(function, *given):
    """What a function returns, or what it raises."""
    try:
        return function(*given)
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def loss_of(results):
    values = [protocol.features_of(y) for y in results]
    return sum(value.float().square().mean() for value in values if value.requires_grad and value.numel())


def go_backward(model, results):
    model.zero_grad()
    loss = loss_of(results)
    if isinstance(loss, torch.Tensor):
        loss.backward()


def same_steps(model, plain, found, expected, low):
    """Both go backward, if layers can: behind an activation in place they may not."""
    if isinstance(attempt(go_backward, plain, expected), str):
        return
    go_backward(model, found)
    limit = 2e-3 if low is None else tolerances.of("gradients", low).rms
    apis.same_gradients(model, plain, limit)


def compare_calls(program, model, plain):
    """Each call of a program, replayed or not, and of its double."""
    for number, call in enumerate(program.calls):
        seed = number + 1000 * program.seed
        torch.manual_seed(seed)
        with settings.override(optimize="graphs" if program.way == "unasked" else "fuse"):
            found = attempt(run, model, call, program.device, program.way)
        with sparse_bridge.eager():
            expected = attempt(run, plain, call, program.device, program.way)
        if isinstance(expected, str) or isinstance(found, str):  # norms of torch refuse to train on a single row
            assert found == expected, f"call {number}: {found}, not {expected}"
            plain.load_state_dict(model.state_dict())
            continue
        low = call.mode.autocast or (program.dtype if program.dtype != torch.float32 else None)
        try:
            for pair in zip(found, expected, strict=True):
                same(*pair)
            if call.mode.grad == "train":
                same_steps(model, plain, found, expected, low)
            for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
                rtol, atol = (1e-3, 1e-4) if low is None else (HALF, HALF)
                said = lambda text, name=name: f"{name}: {text}"  # noqa: E731
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=said)
        except AssertionError as error:
            raise AssertionError(f"call {number}: {error}") from error
        plain.load_state_dict(model.state_dict())  # rounding does not add up


def replays_of(program):
    """Compare all calls of a program; how many calls of its parts were replayed, and why others were not."""
    model = copy.deepcopy(program.model)
    asked = {"parts": [model.parts[number] for number in program.replayed], "whole": [model], "unasked": []}[
        program.way
    ]
    try:
        for module in asked:
            sparse_bridge.optimize(module, graphs=True)
        compare_calls(program, model, program.model)
        said = graph_regions.summary()
        return sum(part.hits for part in said), [part.reason for part in said]
    finally:
        for module in asked:
            sparse_bridge.restore(module)
        graph_regions.remove()
