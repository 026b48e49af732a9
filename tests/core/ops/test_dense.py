"""Dense grids against loops over rows."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.ops.dense import first_outside, to_dense

SHAPE = (2, 3, 4, 5)
SIZES = torch.tensor(SHAPE)


def scene(rows, distinct):
    generator = torch.Generator().manual_seed(rows)
    flat = torch.randperm(120, generator=generator)[:rows]
    if not distinct:
        flat = flat % 7
    coords = torch.stack(torch.unravel_index(flat, SHAPE), 1).int()
    return coords, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("last_wins", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_rows_stand_at_their_coordinates(rows, last_wins, channels_first):
    coords, features = scene(rows, distinct=not last_wins)
    want = torch.zeros(*SHAPE, 3, dtype=torch.float64)
    for where, row in zip(coords.tolist(), features, strict=True):
        want[tuple(where)] = row
    got = to_dense(features, coords, SHAPE, channels_first=channels_first, last_wins=last_wins)
    assert got.is_contiguous()
    assert torch.equal(got, want.movedim(-1, 1) if channels_first else want)


def test_negative_coordinates_count_from_the_end():
    coords, features = scene(20, distinct=True)
    assert torch.equal(to_dense(features, coords - SIZES.int(), SHAPE), to_dense(features, coords, SHAPE))


def test_gradients():
    coords, features = scene(20, distinct=True)
    leaf = features.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: to_dense(x, coords, SHAPE), leaf)


def test_only_the_last_of_equal_coordinates_has_a_gradient():
    coords = torch.tensor([[0, 1], [0, 2], [0, 1]])
    features = torch.ones(3, 1, requires_grad=True)
    to_dense(features, coords, (1, 3), last_wins=True).sum().backward()
    assert features.grad.flatten().tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("where", "negative", "want"),
    [
        ([1, 2, 3, 4], False, None),
        ([1, 2, 4, 4], False, (1, 2, 1)),
        ([1, -1, 3, 5], False, (1, 1, 2)),
        ([1, -1, 3, 5], True, (1, 3, 1)),
        ([-2, -3, -4, -5], True, None),
        ([-3, -3, -4, -5], True, (1, 0, 1)),
    ],
)
def test_the_first_that_is_outside(where, negative, want):
    coords = torch.tensor([[0, 0, 0, 0], where, [1, 1, 1, 1]], dtype=torch.int32)
    assert first_outside(coords, SHAPE, negative=negative) == want


def test_nothing_is_inside_of_everything():
    assert first_outside(torch.zeros(0, 4, dtype=torch.int32), SHAPE) is None
