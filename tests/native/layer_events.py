"""The same: grids, keys, classes, switches, failures, streams, other networks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from torch import nn

from sparse_bridge.core.device import stream_order
from tests.native.world import COORDS, SHAPE, World, event


@event
def another_grid(world: World) -> None:
    x = world.over(world.features)
    x.spatial_shape = [16, 9, 10]
    world(2, x)
    x.spatial_shape = [8.0, 9, 10]
    world(2, x)
    x.spatial_shape = (8, 9, 10)
    world(2, x)
    x.spatial_shape = torch.tensor([8, 9, 10])
    world(2, x)
    x = world.over(world.features)
    x.indices = COORDS[:-1]
    world(2, x)
    x.indices = COORDS[:, 1:]
    world(2, x)
    world(2)


@event
def keys(world: World) -> None:
    for key in ("b", None, [], "a", 7):
        world.net.conv1.indice_key = key
        world(2)
    world.net.conv1.indice_key = "a"
    world.net.conv1.kernel_size = [1, 3, 3]
    world(2)
    world.net.conv1.kernel_size = (3, 3, 3)
    world(2)
    world.net.conv1.kernel_size = [3, 3, 3]
    world.net.conv1.dilation = [2, 1, 1]
    world(2)
    world.net.conv1.dilation = [1, 1, 1]
    world.net.conv1.inverse = True
    world(2)
    world.net.conv1.inverse = False
    world.net.conv1.ndim = 2
    world(2)
    world.net.conv1.ndim = 3
    world.x.indice_dict["a"].indices = torch.zeros(())
    world(2)


@event
def a_subclass(world: World) -> None:
    class Mine(world.sp.SparseConvTensor):  # type: ignore[name-defined]
        pass

    x = Mine(world.features, COORDS, SHAPE, 2)
    x.indice_dict = world.x.indice_dict
    world(3, x)
    x = world.over(world.features)
    x.mine = 1
    world(3, x)
    del x.mine, x.int8_scale
    world(2, x)


@event
def replace_feature_is_patched(world: World) -> None:
    own = world.sp.SparseConvTensor.replace_feature

    def mine(x: Any, features: Any) -> Any:
        made = own(x, features)
        world.recorder.lines.append("mine")
        return made

    with mock.patch.object(world.sp.SparseConvTensor, "replace_feature", mine):
        world(3)
    world(2)


@event
def tf32_is_allowed(world: World) -> None:
    import importlib

    constants: Any = importlib.import_module("spconv.constants")
    for value in (True, False, True):
        with mock.patch.object(constants, "SPCONV_ALLOW_TF32", value):
            world(3)
    del constants.SPCONV_ALLOW_TF32
    world(2)
    constants.SPCONV_ALLOW_TF32 = False


@event
def sums_in_half(world: World) -> None:
    world.net.half()
    world.recorder.name(world.net)
    x = world.over(world.features.half())
    world(3, x)
    world.net.conv1.fp32_accum = False
    world(3, x)
    del world.net.conv1.fp32_accum
    world(3, x)
    type(world.net.conv1).fp32_accum = False
    try:
        world(3, x)
    finally:
        del type(world.net.conv1).fp32_accum


@event
def it_is_watched(world: World) -> None:
    world.x.benchmark = True
    world(2)
    world.x.benchmark = False
    world.net.conv1.record_voxel_count = True
    world(2)
    world.net.conv1.record_voxel_count = False
    with mock.patch.object(world.x._timer, "enable", True):
        world(2)
    world(2)


@event
def a_layer_takes_the_place_of_another(world: World) -> None:
    for _ in range(2):
        kept = copy.deepcopy(world.net.conv1)
        del world.net.conv1
        world.net.conv1 = kept
        del kept
        world.recorder.name(world.net)
        world(3)
    world.net.conv1 = copy.copy(world.net.conv1)
    world(3)
    world.net = copy.deepcopy(world.net)
    world.recorder.name(world.net)
    world(3)


@event
def the_driver_fails(world: World) -> None:
    left = [0]

    def before(name: str) -> int:
        left[0] -= 1
        return 700 if left[0] == 0 else 0

    world.recorder.before = before
    for place in range(1, 6):
        left[0] = place
        world()
        world()
    left[0] = 0
    world(3)


@event
def memory_is_full(world: World) -> None:
    own = torch.Tensor.new_empty
    left = [0]

    def new_empty(tensor: Any, *args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("full")
        return own(tensor, *args, **named)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        for place in range(1, 6):
            left[0] = place
            world()
            world()
    world(3)


@event
def other_streams(world: World) -> None:
    current = [3]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch._C, "_cuda_getCurrentRawStream", lambda index: current[0]),
            (stream_order.StreamOrder, "wait", lambda order, held=tuple: order.waited.append(order.number())),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        world.book.order = object.__new__(stream_order.StreamOrder)  # there is no GPU to ask
        world.book.order.number = lambda: current[0]
        world.book.order.waited = [current[0]]
        world(3)
        current[0] = 5
        world(2)
        world.recorder.lines.append(list(world.book.order.waited))
        current[0] = 2**64 - 1
        world(2)
        current[0] = -1
        world(2)
    world.book.order = None


@event
def tensors_are_of_a_gpu(world: World) -> None:
    """A deferred layer belongs to the stream that was the current one at the call."""
    current = [3]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True, create=True))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0]))
        world(4)
        for then in (3, 5, 3):
            current[0] = 3
            y = world.net.conv1(world.x)
            current[0] = then
            world.tell(lambda y=y: world.net.norm1(y.features))
        current[0] = 3
        world(3)
    world(2)


@event
def parts_of_the_network(world: World) -> None:
    net, x = world.net, world.x
    for _ in range(3):
        y = world.tell(lambda: net.conv1(x))
        world.tell(lambda y=y: y.features.sum())  # somebody reads
        world.tell(lambda y=y: net.norm1(y.features))
    world(3)
    for _ in range(3):
        y = net.conv1(x).features
        world.tell(lambda y=y: net.norm1(y))
        world.tell(lambda y=y: net.norm1(y))  # twice
    for _ in range(3):
        y = net.norm1(net.conv1(x).features)
        world.tell(lambda y=y: nn.functional.leaky_relu(y, 0.1))
        world.tell(lambda y=y: nn.ReLU(inplace=True)(y))
        world.tell(lambda y=y: y + 1)
    for _ in range(4):
        world.tell(lambda: net.conv1(x))  # nothing follows
    world(3)


@event
def sums_of_other_kinds(world: World) -> None:
    net, rows = world.net, len(COORDS)

    def block(other: Any, changed: Any = None) -> Any:
        y = net.norm3(net.conv3(world.x).features)
        if changed is not None:
            changed.add_(1)
        return net.relu(y + other)

    usual = torch.randn(rows, 16)
    for other in (
        usual,
        usual,
        usual,
        torch.randn(16, rows).t(),
        torch.randn(rows, 32)[:, :16],
        usual,
        torch.randn(1, 16),
        2.0,
        torch.randn(rows, 16, dtype=torch.float64),
        usual,
        nn.Parameter(usual),
        torch.randn(rows, 16, requires_grad=True),
        usual,
    ):
        world.tell(lambda other=other: block(other))
    with torch.inference_mode():
        inferred = torch.randn(rows, 16)
    world.tell(lambda: block(inferred))
    for changed in (world.features, net.norm3.weight, net.conv3.weight):
        for _ in range(3):
            world.tell(lambda: block(usual))
        world.tell(lambda changed=changed: block(usual, changed))
    y = net.norm3(net.conv3(world.x).features)
    world.tell(lambda: y + y)
    world.tell(lambda: y + net.norm3(net.conv3(world.x).features))


@event
def operands_change_before_what_follows(world: World) -> None:
    first = world.net

    def changed(stage: int, name: str, sums: bool) -> None:
        world.net = net = copy.deepcopy(first)
        x, other, due = world.over(world.features.clone()), torch.randn(len(COORDS), 16), [0]
        operands = dict([("x", x.features), *net.named_parameters(), *net.named_buffers()])

        def change(now: int) -> None:
            if now == due[0]:
                operands[name].add_(1)

        def block() -> Any:
            y = net.conv3(x).features
            change(1)
            y = net.norm3(y)
            change(2)
            if sums:
                y = y + other
                change(3)
            return net.relu(y)

        for now in (0, 0, 0, 0, stage, 0, 0):
            due[0] = now
            world.tell(block)

    for stage in (1, 2, 3):
        for name in ("x", "conv3.weight", "conv3.bias", "norm3.weight", "norm3.running_var"):
            changed(stage, name, True)
            changed(stage, name, False)
