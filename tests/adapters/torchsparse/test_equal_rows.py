"""Rows that share a coordinate: a look-up finds the first of them, never their sum."""

from __future__ import annotations

import pytest
import torch

from tests import checks

from . import oracle
from .conftest import DEVICES, speaking
from .test_conv import check, points, triple, weights
from .test_generative import generated

LAYERS = [
    # kernel, stride, padding
    (3, 1, 0),
    (2, 1, 0),
    (5, 1, 0),
    (4, 1, 0),
    ((3, 1, 3), 1, 0),
    ((1, 2, 3), 1, 0),
    (1, 2, 0),
    (2, 2, 0),
    (3, 2, 0),
    (3, 2, 1),
    (5, 2, 2),
    (4, 2, 1),
    (2, 3, 0),
    ((3, 1, 1), (2, 1, 1), 0),
    (3, (1, 2, 2), (0, 1, 1)),
]
MODES = {
    "2.1": [("otf", "spconv"), ("hashmap", "spconv"), ("hashmap", "minkowski")],
    "2.0": [("hashmap", "spconv")],
    "1.4": [("hashmap", "spconv")],
}
CASES = [(release, *mode) for release, modes in MODES.items() for mode in modes]
# A real torchsparse 2.1 on an H200: weights 1; features by kmap mode, kernel and stride.
RECORDED = [
    ("hashmap", 2, 2, {(1, 1, 1): [101], (4, 4, 4): [1000]}),
    ("hashmap", 3, 1, {(2, 2, 2): [101, 101], (3, 2, 2): [101], (8, 8, 8): [1000]}),
    ("hashmap", 3, 2, {(1, 1, 1): [101]}),
    ("hashmap_on_the_fly", 2, 2, {(1, 1, 1): [101]}),
    ("hashmap_on_the_fly", 3, 1, {(2, 2, 2): [101, 10], (3, 2, 2): [101], (8, 8, 8): [1000]}),
    ("hashmap_on_the_fly", 3, 2, {(0, 0, 0): [1], (1, 0, 0): [101], (3, 3, 3): [1000]}),
]


def repeated(release, seed=0, shape=(6, 5, 7), share=0.3, low=(0, 0, 0)):
    """Coordinates of which some come twice and one three times, in any order."""
    rows = points(release, shape=shape, share=share, seed=seed, low=low)
    rows = torch.cat([rows, rows[:9], rows[4:5]])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order].contiguous()


def config_of(ts, mode, rule):
    if ts.release != "2.1":
        return None
    found = ts.nn.functional.conv_config.get_default_conv_config().copy()
    found.kmap_mode = "hashmap" if mode == "hashmap" else "hashmap_on_the_fly"
    found.downsample_mode = rule
    return found


@pytest.mark.parametrize("mode, kernel, stride, known", RECORDED)
def test_recorded_answers(ts21, mode, kernel, stride, known):
    F = ts21.nn.functional
    config = F.conv_config.get_default_conv_config().copy()
    config.kmap_mode = mode
    rows = torch.tensor([[0, 2, 2, 2], [0, 2, 2, 2], [0, 3, 2, 2], [0, 8, 8, 8]]).int()
    layer = ts21.nn.Conv3d(1, 1, kernel, stride=stride, bias=False, config=config)
    torch.nn.init.constant_(layer.kernel, 1.0)
    y = layer(ts21.SparseTensor(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]), rows))
    found = {}
    for (_, *site), value in zip(y.C.tolist(), y.F[:, 0].tolist(), strict=True):
        found.setdefault(tuple(site), []).append(value)
    assert {site: found[site] for site in known} == known


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers(case, geometry):
    """Forward, gradients, and the transposed layer back onto the repeated rows."""
    release, mode, rule = case
    with speaking(release) as ts:
        ts.release = release
        for seed in (1, 2):
            given = {"mode": mode, "rule": rule, "config": config_of(ts, mode, rule)}
            check(ts, repeated(release, seed), *geometry, **given)


@pytest.mark.parametrize("extent", [(6, 5, 7), (8, 6, 8)], ids=str)
@pytest.mark.parametrize("geometry", [(3, 1, 0), (2, 2, 0), (3, 2, 1)], ids=str)
def test_in_a_range(ts21, geometry, extent):
    ts21.release = "2.1"
    check(ts21, repeated("2.1", 3), *geometry, extent=extent)


def test_far_apart(ts):
    """Keys of more than 64 bits."""
    rows = repeated("2.1", 4, shape=(3, 3, 3), share=0.6)
    far = rows.clone()
    far[:, 1:] += torch.tensor([2_000_000_000, 1_500_000_001, 2_100_000_000], dtype=torch.int32)
    rows = torch.cat([rows, far])
    rows = rows if ts.release == "2.1" else rows[:, [1, 2, 3, 0]].contiguous()
    mode = "otf" if ts.release == "2.1" else "hashmap"
    check(ts, rows, 3, mode=mode)
    check(ts, rows, 2, 2, mode=mode)


@pytest.mark.parametrize("release", ["1.4", "2.0"])
def test_negative_cells(release):
    with speaking(release) as ts:
        ts.release = release
        check(ts, repeated(release, 5, low=(-3, -4, 2)), 2, 2, mode="hashmap")


@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 2), (3, 1)], ids=str)
def test_generative(ts21, kernel, stride):
    """The first of equal inputs makes the new sites."""
    ts21.nn.functional.conv_config.get_default_conv_config().kmap_mode = "hashmap"
    kernel, stride = triple(kernel), triple(stride)
    coords = repeated("2.1", 6, shape=(3, 4, 3))
    for extent in (40, 3):  # and moved into the range
        given = (2, *(extent * s for s in stride))
        grid = [(e - k) // s + 1 for e, k, s in zip(given[1:], kernel, stride, strict=True)]
        ours = [torch.randn(len(coords), 3).double(), weights(kernel, 3, 5)]
        theirs = [t.clone().requires_grad_() for t in ours]
        ours = [t.requires_grad_() for t in ours]
        x = ts21.SparseTensor(ours[0], coords, 4, given)
        y = ts21.nn.functional.conv3d(x, ours[1], kernel, stride=stride, transposed=True, generative=True)
        sites = oracle.to_sites(coords, "2.1")
        first = {}
        for row, site in enumerate(sites):
            first.setdefault(site, row)
        out, triples = generated(sites, kernel, stride, grid)
        triples = [(v, first[sites[row]], j) for v, row, j in triples]
        assert oracle.to_sites(y.C, "2.1") == out
        want = oracle.product(theirs[0], theirs[1], None, triples, len(out))
        checks.assert_close(y.F, want, torch.float64)
        want.sum().backward()
        y.F.sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            checks.assert_close(one.grad, other.grad, torch.float64)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 1), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_gradients(case, kernel, stride):
    """By finite differences, down and up again."""
    release, mode, rule = case
    with speaking(release) as ts:
        ts.release = release
        coords = repeated(release, 7, shape=(3, 3, 2))[:14].contiguous()
        F, options = ts.nn.functional, {"stride": stride}
        if release == "2.1":
            options["config"] = config_of(ts, mode, rule)
        x = torch.randn(len(coords), 2, dtype=torch.float64)
        down, up = weights(triple(kernel), 2, 2), weights(triple(kernel), 2, 2)

        def network(x, down, up):
            y = F.conv3d(ts.SparseTensor(x, coords), down, kernel, **options)
            return F.conv3d(y, up, kernel, **options, transposed=True).feats

        leaves = [t.requires_grad_() for t in (x, down, up)]
        assert torch.autograd.gradcheck(network, leaves)


def test_rows_that_are_never_found_have_no_gradient(ts):
    """But that of their own centre, where a layer has one."""
    coords = repeated(ts.release, 8)
    sites = coords.tolist()
    later = torch.tensor([sites.index(site) != row for row, site in enumerate(sites)])
    F = ts.nn.functional
    for kernel, stride in ((3, 1), (2, 1), (2, 2), (3, 2)):
        x = torch.randn(len(coords), 3, requires_grad=True)
        weight = weights(triple(kernel), 3, 4, torch.float32)
        y = F.conv3d(ts.SparseTensor(x, coords), weight, kernel, stride=stride)
        up = torch.randn(y.F.shape)
        y.F.backward(up)
        own = torch.zeros(int(later.sum()), 3)
        if ts.release == "2.1" and (kernel, stride) == (3, 1):
            own = up[later] @ weight[13].t()
        torch.testing.assert_close(x.grad[later], own)


@pytest.mark.slow
def test_compiled(ts):
    """A graph finds the same rows."""
    net = torch.nn.Sequential(
        ts.nn.Conv3d(3, 4, 3),
        ts.nn.Conv3d(4, 5, 2, stride=2),
        ts.nn.Conv3d(5, 4, 3),
        ts.nn.Conv3d(4, 3, 2, stride=2, transposed=True),
    )
    coords = repeated(ts.release, 9)
    feats = torch.randn(len(coords), 3)
    run = torch.compile(lambda x: net(ts.SparseTensor(x, coords)).feats, backend="aot_eager")
    one, other = (feats.clone().requires_grad_() for _ in range(2))
    y, want = run(one), net(ts.SparseTensor(other, coords)).feats
    torch.testing.assert_close(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.interpreted
@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES[:2] + CASES[-1:], ids=str)
@pytest.mark.parametrize("geometry", [(3, 1, 0), (2, 1, 0), (2, 2, 0), (3, 2, 1)], ids=str)
def test_by_kernels(lane, case, geometry):
    release, mode, rule = case
    with speaking(release) as ts:
        ts.release = release
        given = {"mode": mode, "rule": rule, "config": config_of(ts, mode, rule)}
        coords = repeated(release, 10, shape=(4, 3, 5))
        check(ts, coords, *geometry, c_in=2, c_out=3, device=lane.device, dtype=torch.float32, **given)


@pytest.mark.emulated
@pytest.mark.parametrize("mode", ["otf", "hashmap"])
@torch.no_grad()
def test_scenes_with_prefetched_maps(kernel_lane, mode):
    """Maps of a scene are queued as the last scenes were; repeated rows are found all the same."""
    with speaking("2.1") as ts:
        ts.release = "2.1"
        config = config_of(ts, mode, "spconv")
        for turn in range(5):
            make = repeated if turn in (2, 4) else points
            coords = make("2.1", seed=turn, shape=(5, 6, 5))
            sites = oracle.to_sites(coords, "2.1")
            x = ts.SparseTensor(torch.randn(len(coords), 4).to(kernel_lane.device), coords.to(kernel_lane.device))
            want, levels = x.feats.cpu().double(), [sites]
            for kernel, stride in ((3, 1), (2, 2), (3, 1)):
                weight = weights(triple(kernel), 4, 4, torch.float32)
                x = ts.nn.functional.conv3d(x, weight.to(kernel_lane.device), kernel, stride=stride, config=config)
                sites, triples = oracle.layer(
                    levels[-1], triple(kernel), triple(stride), (0, 0, 0), (1, 1, 1), "2.1", mode=mode
                )
                levels.append(sites)
                want = oracle.product(want, weight, None, triples, len(sites))
                assert oracle.to_sites(x.coords, "2.1") == sites
                checks.assert_close(x.feats, want, torch.float32)


@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 1), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_of_kmaps(case, kernel, stride):
    """The maps that programs read are those that layers multiply by."""
    release, mode, rule = case
    with speaking(release) as ts:
        ts.release = release
        coords = repeated(release, 11)
        options = {"config": config_of(ts, mode, rule)} if release == "2.1" else {}
        x = ts.SparseTensor(torch.randn(len(coords), 2), coords)
        weight = weights(triple(kernel), 2, 2, torch.float32)
        ts.nn.functional.conv3d(x, weight, kernel, stride=stride, **options)
        (entry,) = x.kmaps.values()
        _, triples = oracle.layer(
            oracle.to_sites(coords, release),
            triple(kernel),
            triple(stride),
            (0, 0, 0),
            (1, 1, 1),
            release,
            mode=mode,
            rule=rule,
        )
        nbmaps, nbsizes = (entry["nbmaps"], entry["nbsizes"]) if release == "2.1" else (entry[0], entry[1])
        offsets = torch.arange(len(nbsizes)).repeat_interleave(nbsizes.long())
        found = zip(offsets.tolist(), *nbmaps.t().tolist(), strict=True)
        assert sorted(found) == sorted(triples)
        if release == "2.1":
            table = entry["out_in_map"]
            rows, places = (table >= 0).nonzero(as_tuple=True)
            found = zip(places.tolist(), table[rows, places].tolist(), rows.tolist(), strict=True)
            assert sorted(found) == sorted(triples)


@pytest.mark.parametrize("device", DEVICES)
def test_reversed_tables_hold_the_first(ts21, device):
    """Where several outputs look up one row."""
    F = ts21.nn.functional
    coords = repeated("2.1", 12).to(device)
    for mode in ("hashmap", "hashmap_on_the_fly"):
        kmap = F.build_kernel_map(coords, len(coords), 3, 1, mode=mode)
        table = kmap["out_in_map"].tolist()
        for found in (kmap["out_in_map_t"], F.convert_transposed_out_in_map(kmap["out_in_map"], len(coords))):
            want = torch.full_like(found, -1, device="cpu")
            for j in reversed(range(len(coords))):
                for v, row in enumerate(table[j]):
                    if row >= 0:
                        want[row, v] = j
            assert torch.equal(found.cpu(), want)
