"""Launch keys of the voxel and key kernels, and their answers at odd addresses."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.core.maps import key_search
from sparse_bridge.core.ops import voxel

from .test_launch_keys import keys, shifted  # noqa: F401

pytestmark = [pytest.mark.emulated]


def test_addresses_of_voxel_operators(kernel_lane, keys):  # noqa: F811
    generator = torch.Generator().manual_seed(0)
    feats, dy = (torch.randn(n, 5, generator=generator) for n in (30, 30))
    index = torch.randint(-1, 9, (30,), generator=generator)
    corners = torch.randint(-1, 9, (30, 8), generator=generator)
    weights = torch.rand(30, 8, generator=generator)
    counts = voxel.count(index, 9)
    kinds = (torch.int32, torch.int64)
    answers = []
    for kind, *shifts in itertools.product(kinds, *[(0, 1)] * 4):
        tensors = (feats, index.to(kind), corners.to(kind), weights)
        x, i, c, w = (shifted(t.to(kernel_lane.device), by) for t, by in zip(tensors, shifts, strict=True))
        x.requires_grad_()
        y = voxel.voxelize(x, i, counts.to(kernel_lane.device))
        z = voxel.devoxelize(y, c, w)
        z.backward(dy.to(kernel_lane.device))
        again = voxel.count(i, 9)
        answers.append((y.detach().clone(), z.detach().clone(), x.grad, again))
    for answer in answers[1:]:
        for one, other in zip(answer, answers[0], strict=True):
            assert torch.equal(one, other)


def test_addresses_of_keys(kernel_lane, keys):  # noqa: F811
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-9, 9, (50, 4), generator=generator).int()
    moves = torch.randint(-2, 3, (3, 3), generator=generator).int()
    answers = []
    for shifts in itertools.product((0, 1), repeat=3):
        r, m = (shifted(t.to(kernel_lane.device), by) for t, by in zip((rows, moves), shifts, strict=False))
        plain, moved = key_search.hash_rows(r), key_search.hash_rows(r, m, first=1, fold=False)
        references = shifted(plain, shifts[2])
        found = key_search.find_keys(plain, references), key_search.find_keys(moved, references)
        answers.append((plain, moved, *found))
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answer, answers[0], strict=True))
