"""Programs see the same whether layers are deferred or not."""

from __future__ import annotations

import contextlib
import functools
import random

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from tests.adapters.programs import CHANNELS, Minkowski, Program, Spconv, Torchsparse
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud
from tests.quick import quick
from tests.rules import layers_deferred

APIS = {
    "spconv": (spconv_apis.standin, Spconv()),
    "spconv wheel": (spconv_apis.patched, Spconv()),
    "torchsparse": (functools.partial(sparse_bridge.enable, "torchsparse", mode="standin"), Torchsparse()),
    "minkowski": (functools.partial(sparse_bridge.enable, "minkowski", mode="standin"), Minkowski()),
}


def streams(api, seed, optimize, calls=5):
    """What a program saw in each of several calls; in some of them somebody reads more."""
    chance = random.Random(seed)
    program = Program(api, seed)
    seen = []
    with settings.override(optimize=optimize), torch.no_grad():
        for call in range(calls):
            coords = cloud((12, 12, 12), 2, 0.03, seed + call)
            rows = torch.randn(len(coords), CHANNELS, generator=torch.Generator().manual_seed(call))
            looks = [chance.randrange(14)] if chance.random() < 0.4 else []
            mode = torch.inference_mode if call == 3 and seed % 4 == 0 else contextlib.nullcontext
            with mode():
                try:
                    program(api.tensor(rows.clone(), coords), looks)
                except RuntimeError as error:  # as of inference tensors in a graph
                    program.see(torch.tensor([len(str(error))]))
                seen.append(program.seen)
    return seen


def check(api, seed):
    want, found = streams(api, seed, "off"), streams(api, seed, "fuse")
    for call, (plain, fused) in enumerate(zip(want, found, strict=True)):
        assert len(plain) == len(fused), (seed, call)
        for place, (a, b) in enumerate(zip(plain, fused, strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape, (seed, call, place)
            # Sums have the same order here, so the same bits; empty batches have none.
            assert torch.equal(a, b) or (
                torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
            ), (seed, call, place, float((a.double() - b.double()).abs().max()))


@pytest.fixture(autouse=True)
def small(rules):
    """Layers of any size are deferred."""
    rules.hold(layers_deferred())


@pytest.mark.parametrize("name", APIS)
@pytest.mark.parametrize("part", quick([0], range(4)))
def test_random_programs(name, part):
    enter, api = APIS[name]
    with enter():
        for seed in range(4 * part, 4 * part + 4):
            check(api, seed)
