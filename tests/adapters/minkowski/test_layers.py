"""Pools, broadcasts and the edge cases of every layer."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import checks

from . import reference
from .scenes import by_site, scene


@pytest.mark.parametrize("mode", ["Sum", "Avg", "Max"])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 3), (3, 2), (3, 1), (2, 3), ([1, 3], [2, 3])])
def test_local_pools(ME, mode, kernel, stride):
    coords, feats = scene(2, 3, seed=7)
    pool = getattr(ME, f"Minkowski{mode}Pooling")(kernel, stride, dimension=2)
    leaf = feats.clone().requires_grad_()
    y = pool(ME.SparseTensor(leaf, coords))
    size, steps = reference.per_axis(kernel, 2), reference.per_axis(stride, 2)
    offsets = reference.offsets_of(size)
    if size == steps:  # bins, not windows
        offsets = list(itertools.product(*(range(k) for k in size)))
    rows = {tuple(site): i for i, site in enumerate(coords.tolist())}
    other = feats.clone().requires_grad_()
    want = []
    for b, *u in y.C.tolist():
        sites = [(b, *(c + o for c, o in zip(u, offset, strict=True))) for offset in offsets]
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
        parents, offsets = by_site(d), reference.offsets_of((k, k))
        for site, got, average in zip(coords.tolist(), u.F, mean.F, strict=True):
            near = [(site[0], *(c - o for c, o in zip(site[1:], offset, strict=True))) for offset in offsets]
            if k == s:
                near = [(site[0], *(c // s * s for c in site[1:]))]
            found = [parents[p] for p in near if p in parents]
            want = sum(found, torch.zeros(2, dtype=torch.float64))
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(average, want / max(1, len(found)))


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
    for pool in (ME.MinkowskiMaxPooling(2, 2, dimension=1), ME.MinkowskiMaxPooling(3, 2, dimension=1)):
        leaf = torch.zeros(4, 1, requires_grad=True)
        pool(ME.SparseTensor(leaf, coords)).F.sum().backward()
        assert leaf.grad.sum() == len(pool(ME.SparseTensor(leaf.detach(), coords)))
        assert leaf.grad[0] == 1 and leaf.grad[3] == 1


EVERY_LAYER = {
    "conv k3": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2),
    "conv k2 s2": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=2, stride=2, dimension=2),
    "conv k1": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=1, bias=True, dimension=2),
    "expand": lambda ME: ME.MinkowskiConvolution(3, 4, kernel_size=3, expand_coordinates=True, dimension=2),
    "generative": lambda ME: ME.MinkowskiGenerativeConvolutionTranspose(3, 4, kernel_size=3, stride=2, dimension=2),
    "transpose": lambda ME: ME.MinkowskiConvolutionTranspose(3, 4, kernel_size=2, stride=2, dimension=2),
    "channelwise": lambda ME: ME.MinkowskiChannelwiseConvolution(3, kernel_size=3, stride=2, dimension=2),
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
        int((coords[:, 0] == 0).sum()),
        0,
        int((coords[:, 0] == 2).sum()),
    ]
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


def test_broadcast_layers_tell_their_operation(ME):
    coords, feats = scene(2, 3, seed=8)
    x = ME.SparseTensor(feats.requires_grad_(), coords)
    glob = ME.MinkowskiGlobalPooling()(x).detach()
    glob.F.requires_grad_()
    for layer, mode in (
        (ME.MinkowskiBroadcastAddition(), ME.BroadcastMode.ELEMENTWISE_ADDITON),
        (ME.MinkowskiBroadcastMultiplication(), ME.BroadcastMode.ELEMENTWISE_MULTIPLICATION),
    ):
        assert layer.operation_type is mode
        keys = x.coordinate_map_key, glob.coordinate_map_key, x.coordinate_manager
        arguments = (x.F, glob.F, layer.operation_type, *keys)
        assert torch.equal(ME.MinkowskiBroadcastFunction().apply(*arguments), layer(x, glob).F)
        assert ME.utils.gradcheck.gradcheck(ME.MinkowskiBroadcastFunction(), arguments)


@pytest.mark.parametrize("mode", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("merged", [False, True])
def test_the_global_pooling_function_of_a_field(ME, mode, merged):
    """By the field's key, also where a map has the same key and another number of rows."""
    generator = torch.Generator().manual_seed(3)
    coords = torch.rand(40, 3, generator=generator) * 3
    coords[:, 0] = torch.arange(40) % 3
    feats = torch.randn(40, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    field = ME.TensorField(feats, coords)
    if merged:
        assert len(field.sparse()) < 40
    mode = getattr(ME.PoolingMode, f"GLOBAL_{mode}_POOLING_PYTORCH_INDEX")
    pooled = ME.MinkowskiGlobalPooling(mode)(field)
    arguments = (feats, mode, field.coordinate_field_map_key, pooled.coordinate_map_key, field.coordinate_manager)
    assert torch.equal(ME.MinkowskiGlobalPoolingFunction().apply(*arguments), pooled.F)
    items = [feats[coords[:, 0] == b] for b in range(3)]
    reduce = {"SUM": lambda f: f.sum(0), "AVG": lambda f: f.mean(0), "MAX": lambda f: f.amax(0)}
    want = torch.stack([reduce[mode.name.split("_")[1]](item) for item in items])
    torch.testing.assert_close(pooled.F, want)
    assert ME.utils.gradcheck.gradcheck(ME.MinkowskiGlobalPoolingFunction(), arguments)
