"""A row of a layer has the same bits whatever the order of the rows is, whatever else is in the
scene or the batch: its result and its input's gradient, of layers of every kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.core import functional
from tests.clouds import cloud
from tests.conftest import EMULATED, INTERPRETED
from tests.quick import quick
from tests.robustness.geometries import CHANNELS, DTYPES

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

KINDS = ("submanifold", "strided", "generative", "inverse", "between")
SLOW = bool(INTERPRETED or EMULATED)
COUNT = 5 if EMULATED else 20 if INTERPRETED else 60
EXTENT = {1: 40, 2: 7, 3: 4, 4: 3} if SLOW else {1: 60, 2: 14, 3: 7, 4: 4}


@dataclasses.dataclass
class Problem:
    """A layer without its scene.  values: of the features of a scene's rows, by site."""

    kind: str
    kernel: tuple[int, ...]
    stride: int
    c_in: int
    c_out: int
    groups: int
    dtype: torch.dtype
    tf32: bool
    seed: int

    def maps(self, coords, device):
        """(kernel map, coordinates of the result)."""
        cmap = functional.coordinate_map(coords.to(device))
        offsets = functional.kernel_offsets(self.kernel)
        if self.kind == "submanifold":
            return functional.submanifold(cmap, offsets), coords
        if self.kind == "between":
            steps = torch.tensor([1, *self.kernel], dtype=torch.int32)
            sites = (coords - (coords % steps)).unique(dim=0)
            given = functional.coordinate_map(sites.to(device))
            return functional.between(cmap, given, offsets, 1), sites
        build = functional.generative if self.kind == "generative" else functional.strided
        new, kmap = build(cmap, offsets, self.stride)
        if self.kind == "inverse":  # features of the sites that are gathered from, back again
            return functional.inverse(kmap), coords
        return kmap, new.coords.cpu()

    def weight(self):
        volume = torch.Size(self.kernel).numel()
        shape = volume, self.c_in, self.groups * self.c_out
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(shape, generator=generator) * (volume * self.c_in) ** -0.5).to(self.dtype)

    def answer(self, lane, coords, x=None):
        """(rows of the result by site, rows of the input's gradient by row); x: features of the
        rows, by default of their sites."""
        kmap, sites = self.maps(coords, lane.device)
        if self.kind == "inverse":
            x = features(
                functional.strided(
                    functional.coordinate_map(coords), functional.kernel_offsets(self.kernel), self.stride
                )[0].coords,
                self.groups * self.c_in,
            )
        elif x is None:
            x = features(coords, self.groups * self.c_in)
        x = x.to(self.dtype).to(lane.device).requires_grad_()
        dy = features(sites, self.groups * self.c_out).cos().to(self.dtype).to(lane.device)
        with lane.serving(self.dtype):
            y = functional.conv(x, self.weight().to(lane.device), None, kmap, groups=self.groups, allow_tf32=self.tf32)
            (dx,) = torch.autograd.grad(y, x, dy)
        return by_site(sites, y.detach().cpu()), dx.cpu(), kmap


def features(sites, channels):
    """[N, channels] by site alone, whatever the item of the batch."""
    steps = torch.arange(1, sites.shape[1], dtype=torch.float64).sqrt() * 7
    phase = (sites[:, 1:].double() * steps).sum(1, keepdim=True)
    return (phase + torch.arange(channels) * 1.7).sin().mul(2).float()


def by_site(sites, rows):
    return {tuple(site): row for site, row in zip(sites.tolist(), rows, strict=True)}


def assert_same(found, expected, but=()):
    """The rows of the expected sites, all but some."""
    for site, row in expected.items():
        assert site in but or torch.equal(found[site], row), site


@st.composite
def problems(draw, kinds=KINDS):
    dimension = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(kinds))
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    return Problem(
        kind,
        tuple(draw(st.integers(1, 3)) for _ in range(dimension)),
        1 if kind in ("submanifold", "between") else draw(st.integers(1, 3)),
        draw(st.sampled_from(CHANNELS)),
        draw(st.sampled_from(CHANNELS)),
        groups,
        draw(st.sampled_from(DTYPES)),
        draw(st.booleans()),
        draw(st.integers(0, 999)),
    )


@st.composite
def scenes(draw, problem):
    """Distinct coordinates of one item, from none at all up to some hundred."""
    shape = tuple(draw(st.integers(1, EXTENT[len(problem.kernel)])) for _ in problem.kernel)
    share = draw(st.sampled_from((0.02, 0.2, 0.5, 1.0)))
    coords = cloud(shape, 1, share, draw(st.integers(0, 999)))
    return coords - torch.tensor([0, *(3 for _ in shape)], dtype=torch.int32)


@pytest.fixture
def exact(lane):
    if lane.dataflow == "explicit":
        pytest.skip("multiplies all rows at once in torch, whose bits follow their number")
    return lane


@settings(max_examples=COUNT)
@given(data=st.data())
def test_the_order_of_rows_does_not_matter(exact, data):
    problem = data.draw(problems())
    coords = data.draw(scenes(problem))
    y, dx, _ = problem.answer(exact, coords)
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(problem.seed))
    other, dx_other, _ = problem.answer(exact, coords[order])
    assert other.keys() == y.keys()
    assert_same(other, y)
    if problem.kind != "inverse":  # whose inputs are the sites of a strided layer
        assert torch.equal(dx_other, dx[order])


@settings(max_examples=COUNT)
@given(data=st.data())
def test_the_rest_of_a_batch_does_not_matter(exact, data):
    """Neither smaller nor larger items before and behind it."""
    problem = data.draw(problems())
    coords = data.draw(scenes(problem))
    y, dx, _ = problem.answer(exact, coords)
    first, last = (data.draw(scenes(problem)) for _ in "ab")
    items = [
        one + torch.tensor([item, *(0,) * len(problem.kernel)], dtype=torch.int32)
        for item, one in enumerate((first, coords, last))
    ]
    other, dx_other, _ = problem.answer(exact, torch.cat(items))
    mine = {(0, *site[1:]): row for site, row in other.items() if site[0] == 1}
    assert mine.keys() == y.keys()
    assert_same(mine, y)
    if problem.kind != "inverse":
        assert torch.equal(dx_other[len(first) : len(first) + len(coords)], dx)


@settings(max_examples=COUNT)
@given(data=st.data(), share=st.sampled_from((0.01, 0.3)))
def test_repeated_coordinates_elsewhere_do_not_matter(exact, data, share):
    """Rows that meet none of them keep their bits, forward and backward."""
    problem = data.draw(problems(KINDS[:3]))
    coords = data.draw(scenes(problem))
    x = features(coords, problem.groups * problem.c_in)
    y, dx, kmap = problem.answer(exact, coords)
    generator = torch.Generator().manual_seed(problem.seed)
    again = (torch.rand(len(coords), generator=generator) < share).nonzero().squeeze(1)
    again = again.repeat(2)
    more = torch.cat([coords, coords[again]]), torch.cat([x, x[again] * 3])
    other, dx_other, _ = problem.answer(exact, *more)
    met = reached(kmap, again)
    if problem.kind == "submanifold":  # the first of equal rows is found, and theirs are sums
        repeated = {tuple(site) for site in coords[again].tolist()}
        assert_same(other, y, but=repeated)
        met = reached(functional.inverse(kmap), again)  # gradients of rows that those look up
        alone = ~met
    else:
        sites = [site for site, hit in zip(y, met.tolist(), strict=True) if hit]
        assert_same(other, y, but=set(sites))
        alone = torch.ones(len(coords), dtype=torch.bool)
    assert torch.equal(dx_other[: len(coords)][alone], dx[alone])


@settings(max_examples=COUNT)
@given(data=st.data(), mode=st.sampled_from(("max", "avg", "sum")), dtype=st.sampled_from(DTYPES))
def test_pools(map_lane, data, mode, dtype):
    """Local ones over any order and batch; global ones, which sum over rows, over any batch."""
    problem = data.draw(problems(KINDS[:2]))
    first, coords, last = (data.draw(scenes(problem)) for _ in "abc")
    step = torch.tensor([1, *(0,) * len(problem.kernel)], dtype=torch.int32)
    together = torch.cat([first, coords + step, last + 2 * step])
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(problem.seed))

    def rows(sites):
        return features(sites, problem.c_in).to(dtype).to(map_lane.device)

    def pooled(sites):
        kmap, new = problem.maps(sites, map_lane.device)
        return by_site(new, functional.pool(rows(sites), kmap, mode).cpu())

    alone, among = pooled(coords), pooled(together[order])
    for site, row in among.items():
        assert site[0] != 1 or torch.equal(row, alone[(0, *site[1:])])
    one, three = (
        functional.global_pool(rows(sites), sites[:, 0].to(map_lane.device), n, mode)
        for sites, n in ((coords, 1), (together, 3))
    )
    assert torch.equal(one[0], three[1])


@pytest.mark.sample(8)
@pytest.mark.parametrize("channels", quick([(32, 48)], [(4, 16), (32, 48), (64, 64)]), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_large_scenes(exact, kind, dtype, channels):
    """Of some ten thousand rows, alone and as the second item, their rows in another order; a
    small part of one, which takes other tiles and blocks."""
    if exact.slow and (channels != (32, 48) or dtype not in DTYPES[::2]):
        pytest.skip("takes long without a GPU")
    stride = 1 if kind == "submanifold" else 2
    problem = Problem(kind, (3,) * 3, stride, *channels, 1, dtype, True, 7)
    near = cloud((5, 5, 5), 1, 0.3, seed=3)
    far = cloud((5 if exact.slow else 34,) * 3, 1, 0.4, seed=4)
    far += torch.tensor([0, 20, 0, 0], dtype=torch.int32)
    y, dx, _ = problem.answer(exact, near)
    coords = torch.cat([near, far]) + torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    coords = torch.cat([far[: len(far) // 3], coords])
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(1))
    other, dx_other, _ = problem.answer(exact, coords[order])
    mine = {(0, *site[1:]): row for site, row in other.items() if site[0] == 1}
    assert_same(mine, y)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    start = len(far) // 3
    assert torch.equal(dx_other[place[start : start + len(near)]], dx)


def reached(kmap, rows):
    """bool [N_out], whether a row of the result meets one of the rows."""
    hit = torch.zeros(kmap.n_out, dtype=torch.bool)
    for v in range(kmap.n_offsets):
        x_rows, y_rows = (one.cpu() for one in kmap.pair_list(v))
        hit[y_rows[torch.isin(x_rows, rows)]] = True
    return hit
