"""Point fields: voxels, slices, splats, interpolation."""

from __future__ import annotations

import itertools

import pytest
import torch


def make(ME, seed=0, n=80, dimension=2, mode="UNWEIGHTED_AVERAGE", channels=3, scale=6.0):
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(n, dimension + 1, generator=generator) - 0.5) * scale
    coords[:, 0] = torch.randint(0, 2, (n,), generator=generator)
    feats = torch.randn(n, channels, generator=generator)
    feats.requires_grad_()
    field = ME.TensorField(feats, coords, quantization_mode=getattr(ME.SparseTensorQuantizationMode, mode))
    return field, feats, coords


def cells(coords, step=1):
    return torch.cat([coords[:, :1], (coords[:, 1:] / step).floor() * step], 1).int()


@pytest.mark.parametrize("mode", ["UNWEIGHTED_AVERAGE", "UNWEIGHTED_SUM", "RANDOM_SUBSAMPLE", "MAX_POOL"])
@pytest.mark.parametrize("stride", [1, 2, [1, 3]])
def test_voxels(ME, mode, stride):
    field, feats, coords = make(ME, mode=mode)
    x = field.sparse(tensor_stride=stride)
    step = torch.tensor(stride)
    voxels = cells(coords, step).tolist()
    members = {}
    for row, voxel in enumerate(voxels):
        members.setdefault(tuple(voxel), []).append(row)
    assert [tuple(site) for site in x.C.tolist()] == list(members)
    assert x.tensor_stride == step.expand(2).tolist()
    reduce = {
        "UNWEIGHTED_AVERAGE": lambda p: p.mean(0),
        "UNWEIGHTED_SUM": lambda p: p.sum(0),
        "RANDOM_SUBSAMPLE": lambda p: p[0],
        "MAX_POOL": lambda p: p.max(0).values,
    }[mode]
    other = feats.detach().clone().requires_grad_()
    want = torch.stack([reduce(other[part]) for part in members.values()])
    torch.testing.assert_close(x.F, want)
    up = torch.randn_like(want)
    x.F.backward(up)
    want.backward(up)
    torch.testing.assert_close(feats.grad, other.grad)
    assert x.C[field.inverse_mapping(x.coordinate_map_key)].tolist() == voxels
    assert not hasattr(x, "inverse_mapping")


def test_points_come_back_from_every_level(ME):
    field, feats, coords = make(ME, 1)
    x = field.sparse()
    down = ME.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2)
    up = ME.MinkowskiConvolutionTranspose(4, 5, kernel_size=2, stride=2, dimension=2)
    d = down(down_in := x)
    u = up(d)
    for y, step in ((down_in, 1), (d, 2), (u, 1)):
        sites = {tuple(site): row for site, row in zip(y.C.tolist(), y.F, strict=True)}
        want = torch.stack([sites[tuple(c)] for c in cells(coords, step).tolist()])
        out = y.slice(field)
        assert type(out) is ME.TensorField and out.C is coords
        torch.testing.assert_close(out.F, want)
        both = y.cat_slice(field)
        torch.testing.assert_close(both.F, torch.cat([want, feats], 1))
    u.slice(field).F.square().sum().backward()
    assert torch.isfinite(feats.grad).all() and feats.grad.abs().sum() > 0


def test_slice_by_a_sparse_tensor(ME):
    coords = torch.tensor([[0, 1], [0, 1], [0, 3], [1, 1]], dtype=torch.int32)
    x = ME.SparseTensor(torch.arange(4.0)[:, None], coords)
    y = ME.MinkowskiReLU()(x)
    out = y.slice(x)
    assert type(out) is ME.TensorField and out.F[:, 0].tolist() == [0, 0, 2, 3]
    assert torch.equal(out.C, coords)
    assert y.cat_slice(x).F.shape == (4, 2)


def test_splat_and_interpolate(ME):
    field, feats, coords = make(ME, 2, n=30)
    x = field.splat()
    want = {}
    for row, (b, *p) in enumerate(coords.tolist()):
        low = [int(c // 1) for c in p]
        for up in itertools.product((0, 1), repeat=2):
            site = (int(b), *(c + u for c, u in zip(low, up, strict=True)))
            weight = 1.0
            for c, s in zip(p, site[1:], strict=True):
                weight *= 1 - abs(c - s)
            want[site] = want.get(site, 0) + weight * feats[row]
    got = {tuple(site): row for site, row in zip(x.C.tolist(), x.F, strict=True)}
    assert got.keys() == want.keys()
    for site, row in got.items():
        torch.testing.assert_close(row, want[site], rtol=1e-4, atol=1e-5)
    back = x.interpolate(field)
    torch.testing.assert_close(back.F, x.features_at_coordinates(coords))
    back.F.sum().backward()
    assert feats.grad is not None


def test_interpolation_beyond_the_voxels_is_zero(ME):
    coords = torch.tensor([[0, 0, 0], [1, 2, 2]], dtype=torch.int32)
    x = ME.SparseTensor(torch.ones(2, 1), coords, tensor_stride=2)
    query = torch.tensor([[0, 0.0, 0], [0, 1, 0], [0, 1, 1], [0, -1, -1], [1, 0, 0], [0, 9e9, 0]])
    assert x.features_at_coordinates(query)[:, 0].tolist() == [1, 0.5, 0.25, 0.25, 0, 0]
    module = ME.MinkowskiInterpolation(return_kernel_map=True, return_weights=True)
    out, (in_map, out_map), weights = module(x, query)
    assert in_map.dtype == out_map.dtype == torch.int32
    total = torch.zeros(6).index_add(0, out_map.long(), weights)
    assert torch.equal(total, out[:, 0])


def test_merging_onto_a_known_map(ME):
    field, _, coords = make(ME, 3)
    x = field.sparse()
    other = ME.TensorField(torch.ones(len(coords), 1), coords, coordinate_manager=field.coordinate_manager)
    y = other.sparse(coordinate_map_key=x.coordinate_map_key)
    assert y.coordinate_map_key == x.coordinate_map_key and (y.F == 1).all()
    far = ME.TensorField(torch.ones(1, 1), torch.tensor([[0, 99.0, 0]]), coordinate_manager=field.coordinate_manager)
    with pytest.raises(AssertionError, match="no voxel"):
        far.sparse(coordinate_map_key=x.coordinate_map_key)


def test_layers_on_fields(ME):
    field, feats, coords = make(ME, 4)
    net = torch.nn.Sequential(
        ME.MinkowskiLinear(3, 4),
        ME.MinkowskiBatchNorm(4),
        ME.MinkowskiLeakyReLU(),
        ME.MinkowskiSinusoidal(4, 4),
        ME.MinkowskiInstanceNorm(4),
    )
    y = net(field)
    assert type(y) is ME.TensorField and y.C is coords and len(y) == len(feats)
    assert y.quantization_mode is field.quantization_mode
    z = ME.cat(y, field)
    assert z.F.shape[1] == 7 and torch.equal(z.sparse().C, field.sparse().C)
    for name, reduce in (("Max", torch.amax), ("Avg", torch.mean), ("Sum", torch.sum)):
        g = getattr(ME, f"MinkowskiGlobal{name}Pooling")()(field)
        want = torch.stack([reduce(feats[coords[:, 0] == b], 0) for b in (0, 1)])
        torch.testing.assert_close(g.F, want)
        assert g.C.tolist() == [[0, 0, 0], [1, 0, 0]]
    total = field + y._with(feats)
    torch.testing.assert_close(total.F, 2 * feats)
    lengths = [len(part) for part in field.decomposed_features]
    assert lengths == torch.bincount(coords[:, 0].long()).tolist()


def test_integer_coordinates_keep_every_digit(ME):
    big = 1 << 28
    coords = torch.tensor([[0, big, -big], [0, big + 1, -big], [0, big + 3, -big]])
    x = ME.TensorField(torch.ones(3, 1), coords).sparse()
    assert x.C.tolist() == coords.tolist()
    assert ME.TensorField(torch.ones(3, 1), coords).sparse(2).C.tolist() == [[0, big, -big], [0, big + 2, -big]]


def test_a_pruned_voxel_cannot_be_sliced(ME):
    field, _, _ = make(ME, 5)
    x = field.sparse()
    y = ME.MinkowskiPruning()(x, torch.arange(len(x)) > 0)
    with pytest.raises(ValueError, match="have no voxel"):
        y.slice(field)


def test_modes_that_undo_nothing(ME):
    field, _, _ = make(ME, mode="UNWEIGHTED_SUM")
    x = field.sparse()
    with pytest.raises(AssertionError, match="slice"):
        x.slice(field)
    with pytest.raises(AssertionError, match="splat"):
        field.sparse(quantization_mode=ME.SparseTensorQuantizationMode.SPLAT_LINEAR_INTERPOLATION)
    with pytest.raises(ValueError, match="merge"):
        field.sparse(quantization_mode=ME.SparseTensorQuantizationMode.NO_QUANTIZATION)
    with pytest.raises(AssertionError):
        ME.TensorField(field.F, field.C, quantization_mode=ME.SparseTensorQuantizationMode.NO_QUANTIZATION)
    with pytest.raises(AttributeError):
        _ = field.tensor_stride
