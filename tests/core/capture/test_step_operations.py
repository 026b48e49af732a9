"""A captured training step launches what the eager step does, and nothing besides."""

from __future__ import annotations

import collections
import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import replay_training
from sparse_bridge.core.ops import pointwise
from tests.core.capture.graph_sizes import graphs_of
from tests.rules import row_kernels_on

from . import apis, pretended
from .pretended import replays_on_the_cpu

# What queues nothing on a GPU, or is made of operations that are counted themselves.
_NAMES = """alias as_strided batch_norm clone contiguous detach detach_ empty empty_like empty_strided expand
full full_like item linear matmul narrow new_empty new_full new_zeros permute relu requires_grad_ reshape resize_
result_type select set_ slice split split_with_sizes squeeze t to _to_copy transpose unbind unsqueeze _unsafe_view
view zeros zeros_like"""
_FREE = {"aten::" + name for name in _NAMES.split()}
_EMULATED, _ONE_LAUNCH = "a launch", "aten::_foreach_copy_"


class Residual(nn.Module):
    """Norms in containers and on bare features, a sum, a cat and a bias."""

    def __init__(self, layers, width=8, mixes=False):
        """mixes: a product of torch reads what a convolution leaves."""
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4) if mixes else nn.Identity()
        self.net = apis.Network(layers, width)
        self.conv, self.norm, self.relu = layers.conv(4, 4, "a"), nn.BatchNorm1d(4), nn.ReLU()
        self.second, self.norm2 = layers.module.SubMConv3d(4, 4, 3, indice_key="a"), nn.BatchNorm1d(4)
        self.shortcut = layers.module.SubMConv3d(4, 4, 1, bias=False)
        self.head = layers.module.SubMConv3d(4, 3, 1)

    def forward(self, x):
        x = self.net(x)["out"]
        y = self.conv(x.replace_feature(self.linear(x.features)))
        y = y.replace_feature(self.relu(self.norm(y.features)))
        y = self.second(y)
        y = y.replace_feature(self.norm2(y.features))
        y = y.replace_feature(self.relu(y.features + self.shortcut(x).features))
        return self.head(y)


class Operations:
    """What is launched: kernels by name, and torch's operations that are not made of others."""

    def __init__(self, patch):
        from amd_emulator import triton_driver

        self.kernels, self.counts, own = [], collections.Counter(), triton_driver._Launcher._run

        def run(launcher, grid, function, args):
            self.kernels.append(function[0])
            with record_function(_EMULATED):
                own(launcher, grid, function, args)

        patch.setattr(triton_driver._Launcher, "_run", run)

    @contextlib.contextmanager
    def noted(self, into=None):
        self.kernels.clear()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            yield
        self.counts = collections.Counter(self.kernels)
        self.counts.update(
            event.name
            for event in found.events()
            if event.name == _ONE_LAUNCH
            or (launches(event) and not any(map(launches, descendants(event))) and not inside(event))
        )
        if into is not None:
            into.append(self.counts)


def launches(event):
    return event.name.startswith("aten::") and event.name not in _FREE


def descendants(event):
    for child in event.cpu_children:
        yield child
        yield from descendants(child)


def inside(event):
    """Whether it is a part of what a GPU launches as one."""
    while event is not None and event.name not in (_EMULATED, _ONE_LAUNCH):
        event = event.cpu_parent
    return event is not None


@pytest.fixture
def captures(kernel_lane, fake_gpu, rules, monkeypatch):
    """(what launches, the operations of every captured pass so far)."""
    if kernel_lane.device != "cpu":
        pytest.skip("the emulator's launches are counted")
    monkeypatch.undo()  # poisoned memory counts as well
    replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    rules.hold(row_kernels_on(kernel_lane.device))
    monkeypatch.setattr(pointwise, "launched", lambda *_: True)
    operations, made = Operations(monkeypatch), []

    def captured_from(work, pool):
        return pretended.capture(lambda: work([operations.noted(made)]), pool)

    def captured(work, pool, room=None):
        def noted():
            with operations.noted(made):
                return work()

        return pretended.capture(noted, pool)

    fake_gpu.replaces(replay_training, captured_from=captured_from, captured=captured)
    return operations, made


# Lists that have room for every row are long enough to be shared, and where they end is computed. They are written
# map by map, where an eager step writes all at once.
_BESIDES = {"_sum_shares", "aten::arange", "aten::mul", "_compact_pairs"}


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("how", ["fp32", *(pytest.param(how, marks=pytest.mark.slow) for how in ("autocast", "zeros"))])
def test_a_step(kernel_lane, captures, how):
    """zeros: the model's own sums over rows want zeros behind the last, which are written then."""
    (operations, made), device = captures, kernel_lane.device
    with apis.standin("spconv") as module:
        plain = Residual(apis.Layers(module, "spconv"), mixes=how == "zeros").to(device).train()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(5):
            x = apis.scene(module, "spconv", seed, device, 0.3)
            results = []
            for one in (plain, model):
                one.zero_grad()
                with operations.noted() if one is plain else contextlib.nullcontext():
                    with torch.autocast(device, torch.bfloat16, enabled=how == "autocast"):
                        y = protocol.features_of(one(x))
                    y.backward(torch.ones_like(y))
                if one is plain:
                    eager = operations.counts
                results.append([y.detach(), *(p.grad for p in one.parameters()), *one.buffers()])
            limit = 2e-2 if how == "autocast" else 1e-4
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)
    assert len(made) >= 2, sparse_bridge.report()
    captured = made[0] + made[1]
    # Three maps, to two of which the backward pass comes back.
    assert captured["_compact_pairs"] == 5 and not captured["_pairs_each"]
    assert captured.pop(_ONE_LAUNCH) == 2  # norms' statistics and counters, kept in case that the call takes no graph
    more = {name for name in captured if captured[name] > eager[name]} - _BESIDES
    assert more == ({"aten::fill_"} if how == "zeros" else set()), {
        name: (eager[name], captured[name]) for name in more
    }
