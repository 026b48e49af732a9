"""Layers against dictionary look-ups in float64, one to six axes, and their edge cases."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import checks
from tests.clouds import cloud

from . import reference


def scene(dimension, channels=3, seed=0, dtype=torch.float64):
    """Random voxels of negative and positive coordinates, rows in random order."""
    extent = {1: 40, 2: 9, 3: 6, 4: 4, 5: 3, 6: 3}[dimension]
    share = {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.25, 5: 0.2, 6: 0.08}[dimension]
    coords = cloud((extent,) * dimension, 2, share, seed)
    coords[:, 1:] -= extent // 2
    generator = torch.Generator().manual_seed(seed)
    return coords, torch.randn(len(coords), channels, generator=generator, dtype=dtype)


def by_site(x):
    return {tuple(site): row for site, row in zip(x.C.tolist(), x.F, strict=True)}


def lookup_conv(coords, feats, kernel, offsets, out_sites):
    """y(u) = sum of x(u + o) @ kernel[o]."""
    rows = {tuple(site): feats[i] for i, site in enumerate(coords.tolist())}
    found = []
    for b, *u in out_sites:
        y = feats.new_zeros(kernel.shape[-1])
        for k, o in enumerate(offsets):
            x = rows.get((b, *(c + d for c, d in zip(u, o, strict=True))))
            y = y if x is None else y + x @ kernel[k]
        found.append(y)
    return torch.stack(found)


def axes(dimension):
    """Anisotropic lists: odd and even sizes next to each other."""
    return [3, 2, 1, 3, 2, 1][:dimension], [1, 2, 2, 1, 2, 1][:dimension]


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["k3", "k2s2", "k3s2", "dilated", "lists"])
def test_convolution(ME, dimension, kind):
    if dimension > 4 and kind in ("dilated", "k3s2"):
        pytest.skip("the geometry is that of fewer axes")
    size, steps = axes(dimension)
    kernel, stride, dilation = {
        "k3": (3, 1, 1), "k2s2": (2, 2, 1), "k3s2": (3, 2, 1), "dilated": (3, 1, 2),
        "lists": (size, steps, 1),
    }[kind]  # fmt: skip
    coords, feats = scene(dimension, seed=dimension)
    conv = ME.MinkowskiConvolution(
        3, 4, kernel_size=kernel, stride=stride, dilation=dilation, bias=True, dimension=dimension
    ).double()
    leaf = feats.clone().requires_grad_()
    y = conv(ME.SparseTensor(leaf, coords))
    steps = reference.per_axis(stride, dimension)
    cells = [(b, *(c // s * s for c, s in zip(u, steps, strict=True))) for b, *u in coords.tolist()]
    assert [tuple(site) for site in y.C.tolist()] == list(dict.fromkeys(cells))
    taps = reference.taps(reference.per_axis(kernel, dimension))
    offsets = [[c * dilation for c in tap] for tap in taps]
    other = feats.clone().requires_grad_()
    weight = conv.kernel.detach().clone().requires_grad_()
    flat = weight if weight.ndim == 3 else weight[None]
    want = lookup_conv(coords, other, flat, offsets, dict.fromkeys(cells)) + conv.bias.detach()
    checks.assert_close(y.F, want, torch.float64)
    up = torch.randn_like(want)
    y.F.backward(up)
    want.backward(up)
    checks.assert_close(leaf.grad, other.grad, torch.float64, "dx")
    checks.assert_close(conv.kernel.grad, weight.grad, torch.float64, "dw")
    checks.assert_close(conv.bias.grad, up.sum(0, keepdim=True), torch.float64, "db")


@pytest.mark.parametrize("dimension", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["back", "new", "generative", "k3s1"])
def test_transposed_convolution(ME, dimension, kind):
    coords, feats = scene(dimension, 2, seed=dimension + 10)
    k, s = (3, 1) if kind == "k3s1" else (2, 2)
    x = ME.SparseTensor(feats, coords)
    ref = reference.SparseTensor(feats, coords)
    nets = []
    for space in (ME, reference.namespace()):
        down = space.MinkowskiConvolution(2, 3, kernel_size=2, stride=2, dimension=dimension)
        name = "MinkowskiConvolutionTranspose"
        name = "MinkowskiGenerativeConvolutionTranspose" if kind == "generative" else name
        up = getattr(space, name)(3, 2, kernel_size=k, stride=s, dimension=dimension)
        nets.append(torch.nn.ModuleList([down, up]).double())
    if kind == "new":  # no finer map exists: start at tensor stride 2
        coarse = torch.cat([coords[:, :1], coords[:, 1:] * 2], 1).contiguous()
        x = ME.SparseTensor(feats, coarse, tensor_stride=2)
        ref = reference.SparseTensor(feats, coarse)
        manager = ref.coordinate_manager
        manager.maps = {((2,) * dimension, ""): ref.sites}
        ref.coordinate_map_key = ((2,) * dimension, "")
        nets = [
            torch.nn.ModuleList([torch.nn.Identity(), space.MinkowskiConvolutionTranspose(
                2, 2, kernel_size=k, stride=s, dimension=dimension)]).double()
            for space in (ME, reference.namespace())
        ]  # fmt: skip
    weights = {
        n: torch.randn(v.shape, dtype=torch.float64) for n, v in nets[0].state_dict().items()
    }
    results = []
    for net, start in zip(nets, (x, ref), strict=True):
        net.load_state_dict(weights)
        results.append(net[1](net[0](start)))
    got, want = results
    assert got.tensor_stride == want.tensor_stride
    mine, theirs = by_site(got), dict(zip(want.sites, want.F, strict=True))
    assert mine.keys() == theirs.keys()
    keys = list(mine)
    checks.assert_close(
        torch.stack([mine[k] for k in keys]), torch.stack([theirs[k] for k in keys]), torch.float64
    )
    if kind == "back":
        assert got.coordinate_map_key == x.coordinate_map_key


def test_custom_and_cross_regions(ME):
    coords, feats = scene(2, 3, seed=3)
    offsets = [[0, 0], [2, -1], [-3, 0]]
    for region, given, taps in (
        (ME.RegionType.CUSTOM, torch.tensor(offsets), offsets),
        (ME.RegionType.HYPER_CROSS, None,
         [[0, 0], [1, 0], [-1, 0], [0, 1], [0, 2], [0, -2], [0, -1]]),
    ):  # fmt: skip
        generator = ME.KernelGenerator(
            kernel_size=[3, 5], region_type=region, region_offsets=given, dimension=2
        )
        conv = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=2).double()
        assert conv.kernel.shape == (len(taps), 3, 4)
        y = conv(ME.SparseTensor(feats, coords))
        want = lookup_conv(coords, feats, conv.kernel.detach(), taps, coords.tolist())
        checks.assert_close(y.F, want, torch.float64)
    # On a strided map a custom offset counts tensor strides, and down and up share the map.
    generator = ME.KernelGenerator(
        stride=2, region_type=ME.RegionType.CUSTOM, region_offsets=offsets, dimension=2
    )
    down = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=2).double()
    up = ME.MinkowskiConvolutionTranspose(4, 3, kernel_generator=generator, dimension=2).double()
    x = ME.SparseTensor(feats.clone().requires_grad_(), coords)
    y = down(x)
    want = lookup_conv(coords, feats, down.kernel.detach(), offsets, y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)
    z = up(y)
    assert z.coordinate_map_key == x.coordinate_map_key
    # The adjoint: <up(y), v> = <y, down_with_up's_weight(v)>.
    v = torch.randn_like(z.F)
    back = lookup_conv(coords, v, up.kernel.detach().transpose(1, 2), offsets, y.C.tolist())
    torch.testing.assert_close((z.F * v).sum(), (y.F * back).sum())


def test_expanded_coordinates(ME):
    coords, feats = scene(2, 2, seed=4)
    conv = ME.MinkowskiConvolution(
        2, 3, kernel_size=3, stride=2, expand_coordinates=True, dimension=2
    ).double()
    y = conv(ME.SparseTensor(feats, coords))
    sites = {
        (b, *(c + o for c, o in zip(u, tap, strict=True)))
        for b, *u in coords.tolist() for tap in reference.taps((3, 3))
    }  # fmt: skip
    sites = {site for site in sites if all(c % 2 == 0 for c in site[1:])}
    assert {tuple(site) for site in y.C.tolist()} == sites and y.tensor_stride == [2, 2]
    want = lookup_conv(coords, feats, conv.kernel.detach(), reference.taps((3, 3)), y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)


def test_output_coordinates_of_every_kind(ME):
    coords, feats = scene(3, 2, seed=5)
    conv = ME.MinkowskiConvolution(2, 3, kernel_size=3, dimension=3).double()
    x = ME.SparseTensor(feats, coords)
    given = torch.cat([coords[5:40] + torch.tensor([0, 1, 0, -1]), coords[:3]]).int().contiguous()
    other = ME.SparseTensor(
        torch.zeros(len(given), 1), given, coordinate_manager=x.coordinate_manager
    )
    want = lookup_conv(
        coords, feats, conv.kernel.detach(), reference.taps((3,) * 3), other.C.tolist()
    )
    for where in (given, other.coordinate_map_key, other):
        y = conv(x, where)
        assert y.tensor_stride == [1, 1, 1] and torch.equal(y.C, other.C)
        checks.assert_close(y.F, want, torch.float64)
    assert conv(x, given).coordinate_map_key != other.coordinate_map_key


def test_a_transpose_onto_a_tensor_of_coordinates_reads_one_place(ME):
    coords, feats = scene(2, 2, seed=6)
    x = ME.SparseTensor(feats, coords)
    down = ME.MinkowskiConvolution(2, 3, kernel_size=2, stride=2, dimension=2).double()
    up = ME.MinkowskiConvolutionTranspose(3, 2, kernel_size=3, stride=2, dimension=2).double()
    d = down(x)
    y = up(d, coords)
    assert y.tensor_stride == [1, 1]
    rows = by_site(d)
    zero = torch.zeros(2, dtype=torch.float64)
    want = [
        rows[tuple(site)] @ up.kernel.sum(0) if tuple(site) in rows else zero
        for site in y.C.tolist()
    ]
    checks.assert_close(y.F, torch.stack(want), torch.float64)


@pytest.mark.parametrize("mode", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize(
    ("kernel", "stride"), [(2, 2), (3, 3), (3, 2), (3, 1), (2, 3), ([1, 3], [2, 3])]
)
def test_local_pools(ME, mode, kernel, stride):
    coords, feats = scene(2, 3, seed=7)
    pool = getattr(ME, f"Minkowski{mode}Pooling")(kernel, stride, dimension=2)
    leaf = feats.clone().requires_grad_()
    y = pool(ME.SparseTensor(leaf, coords))
    size, steps = reference.per_axis(kernel, 2), reference.per_axis(stride, 2)
    offsets = reference.taps(size)
    if size == steps:  # bins, not windows
        offsets = list(itertools.product(*(range(k) for k in size)))
    rows = {tuple(site): i for i, site in enumerate(coords.tolist())}
    other = feats.clone().requires_grad_()
    want = []
    for b, *u in y.C.tolist():
        sites = [(b, *(c + o for c, o in zip(u, tap, strict=True))) for tap in offsets]
        members = [rows[site] for site in sites if site in rows]
        part = other[members]
        if not members:
            want.append(feats.new_zeros(3))
        else:
            reduced = {"Sum": part.sum(0), "Avg": part.mean(0)}.get(mode)
            want.append(part.max(0).values if reduced is None else reduced)
    want = torch.stack(want)
    checks.assert_close(y.F, want, torch.float64)
    up = torch.randn_like(want)
    y.F.backward(up)
    want.backward(up)
    checks.assert_close(leaf.grad, other.grad, torch.float64, "dx")


def test_unpooling(ME):
    coords, feats = scene(2, 2, seed=8)
    x = ME.SparseTensor(feats, coords)
    for k, s in ((2, 2), (3, 2)):
        d = ME.MinkowskiSumPooling(k, s, dimension=2)(x)
        u = ME.MinkowskiPoolingTranspose(k, s, dimension=2)(d)
        mean = ME.MinkowskiAvgUnpooling(k, s, dimension=2)(d)
        assert u.coordinate_map_key == x.coordinate_map_key
        parents, taps = by_site(d), reference.taps((k, k))
        for site, got, average in zip(coords.tolist(), u.F, mean.F, strict=True):
            near = [(site[0], *(c - o for c, o in zip(site[1:], tap, strict=True))) for tap in taps]
            if k == s:
                near = [(site[0], *(c // s * s for c in site[1:]))]
            found = [parents[p] for p in near if p in parents]
            want = sum(found, torch.zeros(2, dtype=torch.float64))
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(average, want / max(1, len(found)))


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_channelwise_convolution(ME, dimension, stride):
    coords, feats = scene(dimension, 5, seed=9)
    conv = ME.MinkowskiChannelwiseConvolution(
        5, kernel_size=3, stride=stride, bias=True, dimension=dimension
    ).double()
    y = conv(ME.SparseTensor(feats, coords))
    diagonal = torch.diag_embed(conv.kernel.detach())
    want = lookup_conv(coords, feats, diagonal, reference.taps((3,) * dimension), y.C.tolist())
    checks.assert_close(y.F, want + conv.bias.detach(), torch.float64)


def test_global_pools_and_broadcasts_with_gaps(ME):
    coords, feats = scene(2, 3, seed=10)
    coords[:, 0] = torch.tensor([4, 1])[coords[:, 0].long()].int()
    coords[::3, 0] = 7
    x = ME.SparseTensor(feats, coords)
    batch = coords[:, 0]
    for name, reduce in (("Sum", torch.sum), ("Avg", torch.mean), ("Max", torch.amax)):
        g = getattr(ME, f"MinkowskiGlobal{name}Pooling")()(x)
        assert g.C.tolist() == [[1, 0, 0], [4, 0, 0], [7, 0, 0]] and g.tensor_stride == [0, 0]
        want = torch.stack([reduce(feats[batch == b], 0) for b in (1, 4, 7)])
        checks.assert_close(g.F, want, torch.float64)
    place = torch.searchsorted(torch.tensor([1, 4, 7]), batch.long())
    spread = want[place]
    assert torch.equal(ME.MinkowskiBroadcast()(x, g).F, spread)
    assert torch.equal(ME.MinkowskiBroadcastAddition()(x, g).F, feats + spread)
    assert torch.equal(ME.MinkowskiBroadcastMultiplication()(x, g).F, feats * spread)
    assert torch.equal(ME.MinkowskiBroadcastConcatenation()(x, g).F, torch.cat([feats, spread], 1))


def test_max_gradient_goes_to_one_row(ME):
    coords = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 5]], dtype=torch.int32)
    for pool in (
        ME.MinkowskiMaxPooling(2, 2, dimension=1),
        ME.MinkowskiMaxPooling(3, 2, dimension=1),
    ):
        leaf = torch.zeros(4, 1, requires_grad=True)
        pool(ME.SparseTensor(leaf, coords)).F.sum().backward()
        assert leaf.grad.sum() == len(pool(ME.SparseTensor(leaf.detach(), coords)))
        assert leaf.grad[0] == 1 and leaf.grad[3] == 1


EVERY_LAYER = {
    "conv k3": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2),
    "conv k2 s2": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=2, stride=2, dimension=2),
    "conv k1": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=1, bias=True, dimension=2),
    "expand": lambda ME: ME.MinkowskiConvolution(
        3, 4, kernel_size=3, expand_coordinates=True, dimension=2
    ),
    "generative": lambda ME: ME.MinkowskiGenerativeConvolutionTranspose(
        3, 4, kernel_size=3, stride=2, dimension=2
    ),
    "transpose": lambda ME: ME.MinkowskiConvolutionTranspose(
        3, 4, kernel_size=2, stride=2, dimension=2
    ),
    "channelwise": lambda ME: ME.MinkowskiChannelwiseConvolution(
        3, kernel_size=3, stride=2, dimension=2
    ),
    "max": lambda ME: ME.MinkowskiMaxPooling(2, 2, dimension=2),
    "max window": lambda ME: ME.MinkowskiMaxPooling(3, 2, dimension=2),
    "avg": lambda ME: ME.MinkowskiAvgPooling(3, 2, dimension=2),
    "sum": lambda ME: ME.MinkowskiSumPooling(3, 3, dimension=2),
    "unpool": lambda ME: ME.MinkowskiPoolingTranspose(2, 2, dimension=2),
    "global avg": lambda ME: ME.MinkowskiGlobalAvgPooling(),
    "global max": lambda ME: ME.MinkowskiGlobalMaxPooling(),
    "instance norm": lambda ME: ME.MinkowskiInstanceNorm(3),
    "batch norm": lambda ME: ME.MinkowskiBatchNorm(3),
    "relu": lambda ME: ME.MinkowskiReLU(),
    "linear": lambda ME: ME.MinkowskiLinear(3, 5),
}


@pytest.mark.parametrize("name", EVERY_LAYER)
@pytest.mark.parametrize("pruned", [False, True])
def test_empty_tensors(ME, name, pruned):
    module = EVERY_LAYER[name](ME)
    leaf = torch.zeros(0, 3, requires_grad=True)
    x = ME.SparseTensor(leaf, torch.zeros(0, 3, dtype=torch.int32), tensor_stride=2)
    if pruned:
        leaf = torch.randn(6, 3, requires_grad=True)
        sites = torch.tensor([[b, 2 * i, -2 * i] for b in range(2) for i in range(3)])
        x = ME.SparseTensor(leaf, sites.int(), tensor_stride=2)
        x = ME.MinkowskiPruning()(x, torch.zeros(6, dtype=torch.bool))
    y = module(x)
    assert len(y) == len(y.C) == (2 if name.startswith("global") and pruned else 0)
    assert not y.F.any() and y.D == 2
    y.F.sum().backward()
    assert leaf.grad is not None and not leaf.grad.any()
    assert len((x + x).F) == len(ME.cat(x, x).F) == 0
    assert len(x.decomposed_features) == (2 if pruned else 0)


def test_a_pruned_item_keeps_its_place(ME):
    coords, feats = scene(2, 3, seed=11)
    coords[::4, 0] = 2
    x = ME.SparseTensor(feats, coords)
    y = ME.MinkowskiPruning()(x, coords[:, 0] != 1)
    assert [len(part) for part in y.decomposed_features] == [
        int((coords[:, 0] == 0).sum()), 0, int((coords[:, 0] == 2).sum())
    ]  # fmt: skip
    norm = ME.MinkowskiInstanceNorm(3).double()
    g = ME.MinkowskiGlobalAvgPooling()(y)
    assert g.C[:, 0].tolist() == [0, 1, 2] and not g.F[1].any()
    out = norm(ME.MinkowskiBroadcastMultiplication()(y, g))
    assert torch.isfinite(out.F).all()
    assert torch.equal(y.C, coords[coords[:, 0] != 1])


def test_instance_norm_of_lone_voxels_gives_the_bias(ME):
    coords = torch.tensor([[0, 1, 1], [1, 5, 5], [2, 0, 0]], dtype=torch.int32)
    norm = ME.MinkowskiInstanceNorm(4)
    with torch.no_grad():
        norm.bias.copy_(torch.arange(4.0))
    y = norm(ME.SparseTensor(torch.randn(3, 4), coords))
    torch.testing.assert_close(y.F, torch.arange(4.0).expand(3, 4))


def test_one_axis_with_a_kernel_of_one_keeps_the_flat_weight(ME):
    """Upstream's shape for D = 1 at any stride; here the stride counts."""
    coords, feats = scene(1, 3, seed=15)
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=1, stride=2, dimension=1).double()
    assert conv.kernel.shape == (3, 4)
    y = conv(ME.SparseTensor(feats, coords))
    assert y.tensor_stride == [2]
    want = lookup_conv(coords, feats, conv.kernel.detach()[None], [[0]], y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)


def test_far_coordinates(ME):
    coords, feats = scene(3, 2, seed=12)
    conv = ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, dimension=3).double()
    want = conv(ME.SparseTensor(feats, coords))
    far = coords.clone()
    far[:, 1:] += torch.tensor([1 << 26, -(1 << 30), (1 << 30) + 2]).int()
    got = conv(ME.SparseTensor(feats, far))
    shift = torch.tensor([0, 1 << 26, -(1 << 30), (1 << 30) + 2]).int()
    assert torch.equal(got.C - shift, want.C) and torch.equal(got.F, want.F)
    # Both in one tensor, which no 64-bit key of cells can span.
    both = ME.SparseTensor(torch.cat([feats, feats]), torch.cat([coords, far]).contiguous())
    y = conv(both)
    n = len(want)
    checks.assert_close(y.F[:n], want.F, torch.float64)
    checks.assert_close(y.F[n:], want.F, torch.float64)
    up = ME.MinkowskiGenerativeConvolutionTranspose(3, 2, kernel_size=3, stride=2, dimension=3)
    up = up.double()
    assert len(up(y)) == 2 * len(up(want))


def test_layers_of_an_encoder_share_their_maps(ME):
    coords, feats = scene(3, 2, seed=13)
    x = ME.SparseTensor(feats, coords)
    a = ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, dimension=3).double()(x)
    b = ME.MinkowskiConvolution(2, 3, kernel_size=1, stride=2, dimension=3).double()(x)
    c = ME.MinkowskiMaxPooling(2, 2, dimension=3)(x)
    assert a.coordinate_map_key == b.coordinate_map_key == c.coordinate_map_key
    a += b
    maps = x.coordinate_manager._manager.kernel_maps
    before = len(maps)
    for _ in range(3):
        ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, dimension=3).double()(x)
    assert len(maps) == before


def test_a_pruned_map_is_not_taken_for_the_strided_one(ME):
    coords, feats = scene(2, 2, seed=14)
    x = ME.SparseTensor(feats, coords)
    down = ME.MinkowskiConvolution(2, 2, kernel_size=2, stride=2, dimension=2).double()
    prune = ME.MinkowskiPruning()
    coarse = down(x)
    few = prune(coarse, torch.arange(len(coarse)) < 3)
    assert few.coordinate_map_key.get_key() == ([2, 2], "pruned")
    other = prune(x, torch.arange(len(x)) >= 5)
    y = down(other)
    cells = {(b, u // 2 * 2, v // 2 * 2) for b, u, v in other.C.tolist()}
    assert {tuple(site) for site in y.C.tolist()} == cells
    assert down(other).coordinate_map_key == y.coordinate_map_key
