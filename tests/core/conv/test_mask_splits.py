"""The masked dataflow with ranges of the offsets: forward and gradients, every kind of map."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import override, registry
from sparse_bridge.core.conv.dataflows import masked
from sparse_bridge.errors import SettingError
from tests.checks import assert_close, assert_error
from tests.core.conv.test_override import Conv, flows
from tests.core.layers import KINDS, check, layer, leaves, tensors
from tests.kernels.calls import target_of

SPLITS = (2, 3, 4)


@pytest.fixture(params=SPLITS)
def split_lane(request, kernel_lane):
    """A lane whose dataflow has mask splits, in force."""
    name = f"masked:{request.param}"
    with settings.override(dataflow=name):
        yield dataclasses.replace(kernel_lane, dataflow=name)


def on_kernels(test):
    return pytest.mark.interpreted(pytest.mark.emulated(test))


@on_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(split_lane, kind):
    check(layer(kind, 2, device=split_lane.device), 16, 24, split_lane)


@on_kernels
@pytest.mark.parametrize("kernel", [1, 2, (1, 3)])
def test_few_offsets(split_lane, kernel):
    """As many ranges as offsets, where there are fewer of those."""
    made = layer("strided", 2, kernel=kernel, padding=0, device=split_lane.device)
    check(made, 3, 5, split_lane)


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_odd_channels(split_lane, dtype):
    check(layer("submanifold", 2, device=split_lane.device), 17, 33, split_lane, dtype=dtype)


@on_kernels
def test_many_offsets_and_groups(kernel_lane):
    with settings.override(dataflow="masked:3"):
        lane = dataclasses.replace(kernel_lane, dataflow="masked:3")
        made = layer("submanifold", shape=(4, 5, 4), kernel=5, device=lane.device)
        check(made, 6, 8, lane, groups=2)


@on_kernels
def test_results_repeat_and_do_not_depend_on_what_was_asked(kernel_lane):
    """Pair lists of wgrad are those of the order of all offsets; bits are the same on a new map,
    whether that order was there first or not."""
    found = []
    for asked in (False, True, True):
        made = layer("submanifold", 2, device=kernel_lane.device)
        x, weight, _, dy = tensors(made, 16, 16)
        if asked:
            made.kmap.rulebook.tiles(0, target_of(kernel_lane))
        a, b = leaves((x, weight), kernel_lane.device)
        with settings.override(dataflow="masked:2"):
            y = functional.conv(a, b, None, made.kmap)
            y.backward(dy.to(kernel_lane.device))
        found.append((y.detach(), a.grad, b.grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@on_kernels
def test_one_order_serves_both_directions_of_a_submanifold_map(kernel_lane):
    made = layer("submanifold", 2, device=kernel_lane.device)
    target, book = target_of(kernel_lane), made.kmap.rulebook
    forward, reverse = masked.split_tiles(book, 0, target, 2)
    assert not reverse and masked.split_tiles(book, 1, target, 2) == (forward, True)


@on_kernels
def test_a_module_takes_them(kernel_lane):
    made = layer("submanifold", 2, device=kernel_lane.device)
    x, weight, _, _ = tensors(made, 16, 16)
    module = Conv(weight).to(kernel_lane.device)
    sparse_bridge.dataflow(module, "masked", splits=3)
    assert flows(module, x.to(kernel_lane.device), made.kmap) == ["masked:3"]
    assert_close(module(x.to(kernel_lane.device), made.kmap), made.truth(x, weight))
    assert "masked:3 dataflow given to" in str(sparse_bridge.report())
    sparse_bridge.dataflow(module, None)


def test_what_a_module_may_be_given():
    module = torch.nn.Linear(1, 1)
    given = {0: "unmasked", 1: "masked", 2: "masked:2", 4: "masked:4"}
    for splits, name in given.items():
        sparse_bridge.dataflow(module, "masked", splits)
        assert override.of(module) == name
    sparse_bridge.dataflow(module, "masked:3")
    assert override.of(module) == "masked:3" and registry.entry("masked:3").splits == 3
    for name, splits in (("masked", 5), ("masked", -1), ("masked", 2.0), ("grouped", 2), (None, 1)):
        call = [f"splits={splits!r}", "masked", "0 to 4"]
        assert_error(lambda n=name, s=splits: sparse_bridge.dataflow(module, n, s), SettingError, call)
    sparse_bridge.dataflow(module, None)
