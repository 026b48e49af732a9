"""FlexGEMM's functions give a row the same bits whatever the order of the rows is, whatever else is
in the batch, and at every call: its result, and the gradient of its features."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_bridge
from tests.clouds import cloud
from tests.conftest import EMULATED
from tests.robustness.geometries import CHANNELS, DTYPES
from tests.robustness.test_one_answer import assert_same, by_site, features

pytestmark = pytest.mark.emulated  # Triton's interpreter multiplies by numpy: bits follow tiles

COUNT = 4 if EMULATED else 12
EXTENT = 7 if EMULATED else 10
SHAPE = (EXTENT, EXTENT - 1, EXTENT + 2)
POINTS = torch.rand(50, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor(SHAPE)


@dataclasses.dataclass
class Scene:
    """One call: features and coordinates of `n` items, and numbers that belong to the layer."""

    flex: object
    x: torch.Tensor
    coords: torch.Tensor
    n: int
    kernel: tuple[int, int, int]
    step: int
    seed: int

    def values(self, *shape):
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(self.x)

    @property
    def weight(self):
        return self.values(5, *self.kernel, self.x.shape[1])

    def at_points(self, y):
        """Rows of sampled points [n, L, C], and numbers of items and points for sites."""
        places = torch.stack(
            torch.meshgrid(torch.arange(self.n), torch.arange(len(POINTS)), indexing="ij"), -1
        ).flatten(0, 1)
        return y.reshape(-1, y.shape[-1]), torch.nn.functional.pad(places, (0, 2))


def submanifold(s):
    y, cache = s.flex.ops.spconv.sparse_submanifold_conv3d(
        s.x, s.coords, (s.n, s.x.shape[1], *SHAPE), s.weight, s.values(5), None, (s.step,) * 3
    )
    again, _ = s.flex.ops.spconv.sparse_submanifold_conv3d(
        s.x, s.coords, (s.n, s.x.shape[1], *SHAPE), s.weight, s.values(5), cache, (s.step,) * 3
    )
    assert torch.equal(again, y)
    return y, s.coords


def strided(s):
    return s.flex.ops.spconv.sparse_conv3d(
        s.x, s.coords, (s.n, s.x.shape[1], *SHAPE), s.weight, s.values(5), stride=(s.step,) * 3, padding=(1,) * 3
    )[:2]


def sampled(s):
    shape = torch.Size((s.n, s.x.shape[1], *SHAPE))
    points = POINTS.expand(s.n, -1, 3).contiguous().to(s.x.device)
    return s.at_points(s.flex.ops.grid_sample.grid_sample_3d(s.x, s.coords, shape, points))


def later_submanifold(s):
    shape = (s.n, *SHAPE, s.x.shape[1])
    return s.flex.submanifold_conv(s.x, s.coords, shape, s.weight, dilation=s.step)[0], s.coords


def there_and_back(s):
    """A strided convolution and the way back through its cache."""
    shape = (s.n, *SHAPE, s.x.shape[1])
    y, sites, out, cache = s.flex.sparse_conv(s.x, s.coords, shape, s.weight, stride=s.step, padding=1)
    back = s.values(3, *s.kernel, 5)
    given = {"stride": s.step, "padding": 1, "neighbor_cache": cache.T}
    up, sites, _, _ = s.flex.sparse_conv_transpose(y, sites, out, back, **given)
    return up, sites


def pooled(reduce):
    def pool(s):
        shape = (s.n, *SHAPE, s.x.shape[1])
        y, sites, *_ = s.flex.sparse_pool(s.x, s.coords, shape, s.kernel, s.step, 0, reduce)
        return y, sites

    return pool


def around(s):
    shape = (s.n, *SHAPE, s.x.shape[1])
    return s.flex.submanifold_pool(s.x, s.coords, shape, s.kernel, "mean")[0], s.coords


def finer(s):
    shape = (s.n, *SHAPE, s.x.shape[1])
    return s.flex.sparse_upsample(s.x, s.coords, shape, (s.step, 1, 2), "linear")[:2]


def coarser(s):
    shape = (s.n, *SHAPE, s.x.shape[1])
    return s.flex.sparse_pixel_unshuffle(s.x, s.coords, shape, (s.step, 2, 1))[:2]


def later_sampled(s):
    items = torch.arange(s.n).repeat_interleave(len(POINTS)).unsqueeze(1)
    points = torch.cat([items, POINTS.repeat(s.n, 1)], 1).to(s.x.device)
    return s.at_points(s.flex.sparse_grid_sample(s.x, s.coords, points))


CALLS = [
    ("1", submanifold),
    ("1", strided),
    ("1", sampled),
    ("2.0", later_submanifold),
    ("2.0", there_and_back),
    ("2.0", pooled("mean")),
    ("2.0", pooled("max")),
    ("2.0", around),
    ("2.0", finer),
    ("2.0", coarser),
    ("2.0", later_sampled),
]


@pytest.fixture(params=CALLS, ids=lambda one: one[1].__name__)
def call(request):
    release, made = request.param
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile=release):
        yield made
    sparse_bridge.disable()


def answer(lane, call, coords, rules, channels, dtype):
    """(rows by site, rows of the gradient)."""
    x = features(coords, channels).to(dtype).to(lane.device).requires_grad_()
    flex = importlib.import_module("flex_gemm")
    with lane.serving(dtype):
        n = int(coords[:, 0].max()) + 1
        y, sites = call(Scene(flex, x, coords.to(lane.device), n, *rules))
        dy = features(sites.cpu(), y.shape[1]).cos().to(dtype).to(lane.device)
        (dx,) = torch.autograd.grad(y, x, dy)
    return by_site(sites, y.detach().cpu()), dx.cpu()


@settings(max_examples=COUNT)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), channels=st.sampled_from(CHANNELS))
def test_rows_in_another_order_and_among_others(lane, call, data, dtype, channels):
    if lane.dataflow == "explicit":
        pytest.skip("multiplies all rows at once in torch, whose bits follow their number")
    kernel = tuple(data.draw(st.sampled_from((1, 3))) for _ in SHAPE)
    rules = kernel, data.draw(st.integers(1, 2)), data.draw(st.integers(0, 99))
    first, coords, last = (
        cloud(SHAPE, 1, data.draw(st.sampled_from((0.03, 0.3, 1.0))), data.draw(st.integers(0, 99))) for _ in "abc"
    )
    if not len(coords):
        coords = torch.zeros(1, 4, dtype=torch.int32)
    step = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    together = torch.cat([first, coords + step, last + 2 * step])
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(rules[-1]))
    y, dx = answer(lane, call, coords, rules, channels, dtype)
    again, dx_again = answer(lane, call, coords, rules, channels, dtype)
    assert_same(again, y)
    assert torch.equal(dx_again, dx)
    among, dx_among = answer(lane, call, together[order], rules, channels, dtype)
    mine = {(0, *site[1:]): row for site, row in among.items() if site[0] == 1}
    assert mine.keys() == y.keys()
    assert_same(mine, y)
    place = order.argsort()
    assert torch.equal(dx_among[place[len(first) : len(first) + len(coords)]], dx)
