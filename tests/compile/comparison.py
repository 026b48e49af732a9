"""Compiled programs beside eager ones: results, gradients, statistics, and how many graphs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.compile.programs import Program, scene


def compare(
    program: Program,
    backend: str,
    scenes: int,
    fullgraph: bool = True,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
) -> None:
    """Compiled and eager agree, and no graph is made after the second scene.

    A value before a ReLU that is zero but for rounding may pass in one program alone. That moves
    gradients by percents where a level has few rows; one scene in five may have such a value.
    """
    program.to(device)
    twin = copy.deepcopy(program)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, backend=backend, fullgraph=fullgraph)
    graphs, moved = [], []
    for number in range(scenes):
        features, coords = (tensor.to(device) for tensor in scene(number))
        results = []
        for run in (compiled, twin):
            with autocast_to(device, autocast):
                y = run(features, coords)
            if program.training:
                y.square().mean().backward()
            results.append(y)
        graphs.append(counters["stats"]["unique_graphs"])
        same = assert_same if autocast is None else assert_near
        same(*results)
        compare_statistics(program, twin, same)
        if program.training:
            mine, theirs = gradients(program), gradients(twin)
            assert_near(torch.cat(mine), torch.cat(theirs), 0.1)
            try:
                if autocast is None:
                    compare_gradients(mine, theirs)
            except AssertionError as error:
                moved.append(error)
    assert graphs[-1] == graphs[min(1, scenes - 1)], graphs
    if len(moved) > scenes // 5:
        raise moved[-1]


def autocast_to(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Autocast to `dtype`; None: no autocast."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)


def assert_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal but for rounding, which norms over few rows magnify: fp32 results of either program are
    up to 3e-5 from those in fp64, where values are about 1. Integers are equal."""
    if not theirs.is_floating_point():
        assert torch.equal(mine, theirs)
        return
    scale = float(theirs.detach().double().norm()) / max(1, theirs.numel()) ** 0.5
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 + 1e-4 * scale)


def assert_near(mine: torch.Tensor, theirs: torch.Tensor, limit: float = 0.03) -> None:
    """Equal as programs in half precision are: by the root of the mean of squares."""
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    error, size = (float(one.double().norm()) for one in (mine - theirs, theirs))
    assert error <= limit * size, f"{error:.3g} beside {size:.3g}"


def compare_statistics(program: nn.Module, twin: nn.Module, same: Callable[..., None] = assert_same) -> None:
    """Buffers of two programs are the same."""
    for pair in zip(program.buffers(), twin.buffers(), strict=True):
        same(*pair)


def gradients(program: nn.Module) -> list[torch.Tensor]:
    """The gradients of all parameters, flat, empty where there is none; then they have none."""
    found = []
    for parameter in program.parameters():
        grad, parameter.grad = parameter.grad, None
        found.append(parameter.new_empty(0) if grad is None else grad.flatten())
    return found


def compare_gradients(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """What `gradients` returned for two programs is the same."""
    for pair in zip(mine, theirs, strict=True):
        assert_same(*pair)
