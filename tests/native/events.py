"""What may happen between two calls of a network of spconv, for `test_events`: modes, values and
memory of what it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import settings
from sparse_bridge.kernels.runtime import precompile
from sparse_bridge.kernels.runtime.triton_compat import HOOKS
from tests.native.world import COORDS, EVENTS, World, event


def inside(*contexts: Callable[[], Any]) -> Callable[[World], None]:
    def run(world: World) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            world(3)
        world(2)

    return run


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Hook:
    calls = (print,)


EVENTS |= {
    "nothing": lambda world: world(3),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "inference_mode": inside(torch.inference_mode),
    "gradients": inside(torch.enable_grad),
    "torch functions": inside(_Functions),
    "torch dispatches": inside(_Dispatches),
    "forward gradients": inside(torch.autograd.forward_ad.dual_level),
    "autograd's anomalies": inside(torch.autograd.detect_anomaly),
    "optimize off": inside(lambda: settings.override(optimize="off")),
    "tune off": inside(lambda: settings.override(tune="off")),
    "shared keys": inside(lambda: settings.override(shared_keys=True)),
    "another GPU is current": inside(lambda: mock.patch.object(torch._C, "_cuda_getDevice", lambda: 1)),
    "a launch hook": inside(lambda: mock.patch.object(HOOKS, "launch_enter_hook", _Hook(), create=True)),
    "a launch hook of an older Triton": inside(
        lambda: mock.patch.object(HOOKS, "launch_enter_hook", print, create=True)
    ),
    "a dry run": inside(precompile.dry_run),
}


@event
def norms_change_in_place(world: World) -> None:
    for norm in (world.net.norm1, world.net.norm3):
        for one in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            with torch.no_grad():
                one.add_(0.5)
            world(2)


@event
def norms_get_other_memory(world: World) -> None:
    world.net.norm1.weight.data = torch.rand(16)
    world(2)
    world.net.norm2.weight = nn.Parameter(torch.rand(16))
    world(3)
    world.net.norm3.running_var = torch.rand(16)
    world(3)
    world.net.norm1.eps = 0.1
    world(3)
    world.net.norm1.weight = world.net.norm1.bias = None
    world(3)
    world.net.norm2.momentum = None
    world(2)


@event
def weights_change(world: World) -> None:
    with torch.no_grad():
        world.net.conv1.weight.mul_(2)
    world(2)
    world.net.conv1.weight.data = torch.rand_like(world.net.conv1.weight)
    world(2)
    world.net.conv2.weight = nn.Parameter(torch.rand_like(world.net.conv2.weight))
    world(3)
    world.net.double()
    world.recorder.name(world.net)
    world(3)
    world(3, world.over(world.features.double()))
    world.net.float()
    world.recorder.name(world.net)
    world(3)


@event
def biases_change(world: World) -> None:
    world.net.conv1.bias = nn.Parameter(torch.rand(16))
    world(3)
    world.net.conv1.bias.data = torch.rand(16)
    world(2)
    world.net.conv1.bias = None
    world(3)


@event
def it_trains(world: World) -> None:
    world.net.train()
    world(2)
    world.net.eval()
    world(3)
    world.net.norm1.train()
    world(3)


@event
def hooks(world: World) -> None:
    for module in (world.net.conv1, world.net.norm1, world.net.relu):
        hook = module.register_forward_hook(lambda module, given, made: None)
        world(2)
        hook.remove()
        hook = module.register_forward_pre_hook(lambda module, given: None)
        world(2)
        hook.remove()
        world(2)
    hook = world.net.norm1.register_forward_hook(lambda module, given, made: made * 2)
    world(3)
    hook.remove()
    world(2)


@event
def rows_are_far_apart(world: World) -> None:
    wide = world.over(torch.randn(len(COORDS), 40)[:, :16])
    world(4, wide)
    world(2)
    world(4, wide)
    world(3, world.over(torch.randn(16, len(COORDS)).t()))
    world(2, world.over(torch.randn(len(COORDS), 32)[:, ::2]))
    world(2, world.over(torch.randn(1, 16).expand(len(COORDS), 16)))
    world(2)


@event
def rows_start_anywhere(world: World) -> None:
    memory = torch.randn(len(COORDS) * 16 + 1)
    world(3, world.over(memory[1:].view(-1, 16)))
    world(2)


@event
def other_dtypes(world: World) -> None:
    for dtype in (torch.float64, torch.float16, torch.int32):
        world(2, world.over(world.features.to(dtype)))
    world(2)


@event
def features_that_are_none(world: World) -> None:
    for wrong in (
        torch.tensor(1.0),
        torch.zeros(16),
        torch.zeros(len(COORDS), 16, 1),
        torch.zeros(3, 16),
        torch.zeros(len(COORDS), 8),
        torch.zeros(0, 16),
        nn.Parameter(world.features),
    ):
        x = world.over(world.features)
        x._features = wrong
        world(1, x)
    with torch.inference_mode():
        x = world.over(world.features.clone())
    world(2, x)
    world(2)
