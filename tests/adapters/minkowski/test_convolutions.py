"""Convolutions against dictionary look-ups in float64, one to six axes."""

from __future__ import annotations

import pytest
import torch

from tests import checks

from . import reference
from .scenes import by_site, lookup_conv, scene


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
        "k3": (3, 1, 1),
        "k2s2": (2, 2, 1),
        "k3s2": (3, 2, 1),
        "dilated": (3, 1, 2),
        "lists": (size, steps, 1),
    }[kind]
    coords, feats = scene(dimension, seed=dimension)
    conv = ME.MinkowskiConvolution(
        3, 4, kernel_size=kernel, stride=stride, dilation=dilation, bias=True, dimension=dimension
    ).double()
    leaf = feats.clone().requires_grad_()
    y = conv(ME.SparseTensor(leaf, coords))
    steps = reference.per_axis(stride, dimension)
    cells = [(b, *(c // s * s for c, s in zip(u, steps, strict=True))) for b, *u in coords.tolist()]
    assert [tuple(site) for site in y.C.tolist()] == list(dict.fromkeys(cells))
    offsets = reference.offsets_of(reference.per_axis(kernel, dimension))
    offsets = [[c * dilation for c in offset] for offset in offsets]
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
            torch.nn.ModuleList(
                [
                    torch.nn.Identity(),
                    space.MinkowskiConvolutionTranspose(2, 2, kernel_size=k, stride=s, dimension=dimension),
                ]
            ).double()
            for space in (ME, reference.namespace())
        ]
    weights = {n: torch.randn(v.shape, dtype=torch.float64) for n, v in nets[0].state_dict().items()}
    results = []
    for net, start in zip(nets, (x, ref), strict=True):
        net.load_state_dict(weights)
        results.append(net[1](net[0](start)))
    got, want = results
    assert got.tensor_stride == want.tensor_stride
    mine, theirs = by_site(got), dict(zip(want.sites, want.F, strict=True))
    assert mine.keys() == theirs.keys()
    keys = list(mine)
    checks.assert_close(torch.stack([mine[k] for k in keys]), torch.stack([theirs[k] for k in keys]), torch.float64)
    if kind == "back":
        assert got.coordinate_map_key == x.coordinate_map_key


def test_custom_and_cross_regions(ME):
    coords, feats = scene(2, 3, seed=3)
    offsets = [[0, 0], [2, -1], [-3, 0]]
    for region, given, values in (
        (ME.RegionType.CUSTOM, torch.tensor(offsets), offsets),
        (ME.RegionType.HYPER_CROSS, None, [[0, 0], [1, 0], [-1, 0], [0, 1], [0, 2], [0, -2], [0, -1]]),
    ):
        generator = ME.KernelGenerator(kernel_size=[3, 5], region_type=region, region_offsets=given, dimension=2)
        conv = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=2).double()
        assert conv.kernel.shape == (len(values), 3, 4)
        y = conv(ME.SparseTensor(feats, coords))
        want = lookup_conv(coords, feats, conv.kernel.detach(), values, coords.tolist())
        checks.assert_close(y.F, want, torch.float64)
    # On a strided map a custom offset counts tensor strides, and down and up share the map.
    generator = ME.KernelGenerator(stride=2, region_type=ME.RegionType.CUSTOM, region_offsets=offsets, dimension=2)
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
    conv = ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, expand_coordinates=True, dimension=2).double()
    y = conv(ME.SparseTensor(feats, coords))
    sites = {
        (b, *(c + o for c, o in zip(u, offset, strict=True)))
        for b, *u in coords.tolist()
        for offset in reference.offsets_of((3, 3))
    }
    sites = {site for site in sites if all(c % 2 == 0 for c in site[1:])}
    assert {tuple(site) for site in y.C.tolist()} == sites and y.tensor_stride == [2, 2]
    want = lookup_conv(coords, feats, conv.kernel.detach(), reference.offsets_of((3, 3)), y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)


def test_output_coordinates_of_every_kind(ME):
    coords, feats = scene(3, 2, seed=5)
    conv = ME.MinkowskiConvolution(2, 3, kernel_size=3, dimension=3).double()
    x = ME.SparseTensor(feats, coords)
    given = torch.cat([coords[5:40] + torch.tensor([0, 1, 0, -1]), coords[:3]]).int().contiguous()
    other = ME.SparseTensor(torch.zeros(len(given), 1), given, coordinate_manager=x.coordinate_manager)
    want = lookup_conv(coords, feats, conv.kernel.detach(), reference.offsets_of((3,) * 3), other.C.tolist())
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
    want = [rows[tuple(site)] @ up.kernel.sum(0) if tuple(site) in rows else zero for site in y.C.tolist()]
    checks.assert_close(y.F, torch.stack(want), torch.float64)


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_channelwise_convolution(ME, dimension, stride):
    coords, feats = scene(dimension, 5, seed=9)
    conv = ME.MinkowskiChannelwiseConvolution(5, kernel_size=3, stride=stride, bias=True, dimension=dimension).double()
    y = conv(ME.SparseTensor(feats, coords))
    diagonal = torch.diag_embed(conv.kernel.detach())
    want = lookup_conv(coords, feats, diagonal, reference.offsets_of((3,) * dimension), y.C.tolist())
    checks.assert_close(y.F, want + conv.bias.detach(), torch.float64)


def test_one_axis_with_a_kernel_of_one_keeps_the_flat_weight(ME):
    """Upstream's shape for D = 1 at any stride; here the stride counts."""
    coords, feats = scene(1, 3, seed=15)
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=1, stride=2, dimension=1).double()
    assert conv.kernel.shape == (3, 4)
    y = conv(ME.SparseTensor(feats, coords))
    assert y.tensor_stride == [2]
    want = lookup_conv(coords, feats, conv.kernel.detach()[None], [[0]], y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)


def test_a_tensor_stride_that_is_only_a_label(ME):
    """Coordinates that are no multiples of it: offsets count strides, the formulas stay."""
    coords, feats = scene(2, 3, seed=16)
    x = ME.SparseTensor(feats, coords, tensor_stride=2)
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2).double()
    offsets = [[2 * c for c in offset] for offset in reference.offsets_of((3, 3))]
    want = lookup_conv(coords, feats, conv.kernel.detach(), offsets, coords.tolist())
    checks.assert_close(conv(x).F, want, torch.float64)
    down = ME.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2).double()
    y = down(x)
    cells = [(b, *(c // 4 * 4 for c in u)) for b, *u in coords.tolist()]
    assert [tuple(site) for site in y.C.tolist()] == list(dict.fromkeys(cells))
    want = lookup_conv(coords, feats, down.kernel.detach(), offsets, y.C.tolist())
    checks.assert_close(y.F, want, torch.float64)
    up = ME.MinkowskiGenerativeConvolutionTranspose(3, 4, kernel_size=2, stride=2, dimension=2)
    sites = {
        (b, *(c + o for c, o in zip(u, offset, strict=True)))
        for b, *u in coords.tolist()
        for offset in reference.offsets_of((2, 2))
    }
    z = up.double()(x)
    assert {tuple(site) for site in z.C.tolist()} == sites and z.tensor_stride == [1, 1]
    cells = {(b, *(c // 4 * 4 for c in u)) for b, *u in coords.tolist()}
    pooled = ME.MinkowskiSumPooling(2, 2, dimension=2)(x)
    assert {tuple(site) for site in pooled.C.tolist()} == cells
    torch.testing.assert_close(pooled.F.sum(0), feats.sum(0))


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
