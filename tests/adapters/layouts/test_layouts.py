"""Every tensor that a user hands over, in every layout, through every API: the same results and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparse_bridge.core.geometry.weights import fills_its_memory
from tests.layouts import expanded, layouts
from tests.quick import quick

from .programs import APIS, CASES, PARAMETERS, Program, Tensors


def leaves(tensors: Tensors) -> Tensors:
    """The tensors as users have them, with gradients, each in its own memory and strides."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name in PARAMETERS:
            made[name] = nn.Parameter(tensor.detach())
        else:
            made[name] = tensor.detach().requires_grad_(tensor.is_floating_point())
    return made


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [one for part in results for one in flat(part)]


def outcome(module: Any, program: Program, tensors: Tensors) -> tuple[list[torch.Tensor], Tensors]:
    """(results with gradients, and of four calls without; gradients by name)."""
    given = leaves(tensors)
    run: Callable[[], Any] = program(module, **given)
    results = flat(run())
    learns = [y for y in results if y.requires_grad]
    torch.autograd.backward([y.square().sum() for y in learns])
    with torch.no_grad():
        for _ in range(4):
            results += flat(run())
    grads = {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}
    return [y.detach() for y in results], grads


def check(got: tuple[list[torch.Tensor], Tensors], want: tuple[list[torch.Tensor], Tensors], argument: str) -> None:
    assert len(got[0]) == len(want[0]) and got[1].keys() == want[1].keys()
    for mine, its in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    if argument == "gain":  # torch 2.13's own norms, on the CPU, return wrong gradients where it has gaps
        return
    for name, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][name], rtol=1e-3, atol=1e-3)


def steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the axes along which there is more than one entry."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


QUICK = [
    ("spconv", "SubMConv2d"),
    ("spconv", "one offset"),
    ("spconv patched", "SubMConv3d, inference"),
    ("torchsparse", "conv3d"),
    ("minkowski", "down and up"),
    ("minkowski", "TensorField"),
    ("functional", "kernel_map"),
    ("torch_geometric", "RGCNConv"),
]


@pytest.mark.parametrize("case", quick(QUICK, CASES), ids=", ".join)
def test_every_layout(case):
    api, name = case
    enter, programs = APIS[api]
    program, tensors = programs[name]
    with enter() as module:
        want = outcome(module, program, tensors)
        for argument, tensor in tensors.items():
            for layout, laid in layouts(tensor).items():
                got = outcome(module, program, {**tensors, argument: laid})
                try:
                    check(got, want, argument)
                    if argument in PARAMETERS and fills_its_memory(laid):
                        assert steps(got[1][argument]) == steps(laid)
                except AssertionError as error:
                    raise AssertionError(f"{argument}, {layout}: {error}") from error


@pytest.mark.parametrize("case", quick(QUICK[:1], CASES), ids=", ".join)
def test_memory_that_overlaps_itself(case):
    api, name = case
    enter, programs = APIS[api]
    program, tensors = programs[name]
    with enter() as module:
        for argument, tensor in tensors.items():
            if tensor.is_floating_point() and argument != "points":
                for layout, laid in expanded(tensor).items():
                    want = outcome(module, program, {**tensors, argument: laid.contiguous()})
                    try:
                        check(outcome(module, program, {**tensors, argument: laid}), want, argument)
                    except AssertionError as error:
                        raise AssertionError(f"{argument}, {layout}: {error}") from error


def test_checkpoints_and_graphs():
    """A state that is assigned keeps its strides; graphs, and their gradients, take them as they are."""
    enter, programs = APIS["spconv"]
    with enter() as sp:
        features, indices = (programs["SubMConv3d"][1][name] for name in ("features", "indices"))
        plain, other = sp.SubMConv3d(8, 6, 3), sp.SubMConv3d(8, 6, 3)
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        state["weight"] = state["weight"].contiguous(memory_format=torch.channels_last_3d)
        other.load_state_dict(state, assign=True)
        assert other.weight.stride() == state["weight"].stride() != plain.weight.stride()

        def run(layer: nn.Module) -> torch.Tensor:
            return layer(sp.SparseConvTensor(features, indices, [5, 6, 4], 2)).features

        run(plain).square().sum().backward()
        importlib.import_module("sparse_bridge.compile")
        torch.compile(run, backend="aot_eager", fullgraph=True)(other).square().sum().backward()
        torch.testing.assert_close(other.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
        assert other.weight.grad.stride() == other.weight.stride()
