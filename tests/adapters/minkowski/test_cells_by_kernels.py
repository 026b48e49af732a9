"""Pools whose kernel is their stride, where kernels run: cells are windows, or are not, and all give the same."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters.minkowski import pool as pools
from tests import checks
from tests.clouds import cloud, features

pytestmark = pytest.mark.emulated

SHAPE = (9, 8, 7)


def scene(device, seed=3, step=1, share=0.3):
    coords = cloud(SHAPE, 2, share=share, seed=seed, device=device)
    coords[:, 1:] = coords[:, 1:] * step - 4  # cells begin below zero, too
    return coords, features(len(coords), 5, seed=seed, device=device)


def pooled(ME, mode, coords, values, up, size=2, dilation=1, tensor_stride=1, target=None):
    """(coordinates, features, gradient) of a pool."""
    pool = getattr(ME, f"Minkowski{mode}Pooling")(size, size, dilation, dimension=3)
    leaf = values.clone().requires_grad_()
    x = ME.SparseTensor(leaf, coords, tensor_stride=tensor_stride)
    y = pool(x) if target is None else pool(x, target)
    y.F.backward(up[: len(y)])
    return y.C, y.F.detach(), leaf.grad


CASES = {
    "plain": {},
    "large": {"size": 4},
    "odd": {"size": 3},
    "mixed": {"size": [2, 4, 1]},
    "dilated": {"dilation": 2},
    "strided": {"tensor_stride": 2, "step": 2},
    "between strides": {"tensor_stride": 2},  # coordinates that are no multiples of it
    "given": {"given": True},
}


@pytest.mark.parametrize("mode", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pools_are_those_of_the_cells(ME, map_lane, monkeypatch, mode, case):
    """dilation has no effect, and coordinates between the strides belong to their cells: MinkowskiEngine's rule."""
    device, options = map_lane.device, dict(case)
    coords, values = scene(device, step=options.pop("step", 1))
    values[::3] = values[1::3][: len(values[::3])]  # ties
    if options.pop("given", False):
        given = torch.div(coords[::2], 2, rounding_mode="floor") * 2
        given[:, 0] = coords[::2, 0]
        options["target"] = given.unique(dim=0)
    up = features(len(coords), 5, seed=9, device=device)
    found = pooled(ME, mode, coords, values, up, **options)
    monkeypatch.setattr(pools, "cells_are_windows", lambda *_: False)
    with settings.override(dataflow="per_offset"):
        expected = pooled(ME, mode, coords, values, up, **options)
    assert torch.equal(found[0], expected[0])
    checks.assert_close(found[1], expected[1].double(), torch.float32)
    checks.assert_close(found[2], expected[2].double(), torch.float32, "dx")


def test_whichcells_are_windows(ME, kernel_lane, monkeypatch):
    seen, own = [], pools.cells_are_windows
    monkeypatch.setattr(pools, "cells_are_windows", lambda *args: seen.append(own(*args)) or seen[-1])
    coords, values = scene(kernel_lane.device)
    for case in CASES.values():
        case = {name: value for name, value in case.items() if name not in ("step", "given")}
        pooled(ME, "Max", coords * (case.get("tensor_stride") or 1), values, values, **case)
    assert seen == [True, True, False, True, False, True, True, True]
    x = ME.SparseTensor(values, coords + coords.new_tensor([0, 0, 1, 0]), tensor_stride=2)
    ME.MinkowskiMaxPooling(2, 2, dimension=3)(x)
    assert seen.pop() is False


@pytest.mark.parametrize("mode", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_target_of_another_stride(ME, map_lane, mode, size):
    """Each input belongs to its cell of the target: with the inputs' own map to itself alone."""
    coords, values = scene(map_lane.device)
    pool = getattr(ME, f"Minkowski{mode}Pooling")
    x = ME.SparseTensor(values, coords)
    expected = x if size == 1 else pool(size, size, dimension=3)(x)
    found = pool(2, 2, dimension=3)(x, expected.coordinate_map_key)
    assert found.coordinate_map_key == expected.coordinate_map_key
    checks.assert_close(found.F, expected.F.double(), torch.float32)
