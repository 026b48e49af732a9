"""Regions that differ by axis, and kernels whose offsets meet on a tensor stride of 0."""

from __future__ import annotations

import pytest
import torch

from tests import checks

from .scenes import by_site, lookup_conv, scene

CUBE, CROSS = 0, 1


def by_hand(sizes, kinds):
    """The offsets that MinkowskiEngine 0.4 lists, axis by axis."""
    offsets = [[0] * len(sizes)]
    for kind in (CUBE, CROSS):
        for axis, (size, is_kind) in enumerate(zip(sizes, kinds, strict=True)):
            centre = (size - 1) // 2
            steps = [r - centre for r in range(size) if r != centre]
            if is_kind != kind:
                continue
            new = []
            for start in offsets if kind == CUBE else offsets[:1]:
                for step in steps:
                    new.append(start[:axis] + [step] + start[axis + 1 :])
            offsets += new
    return offsets


@pytest.mark.parametrize(
    ("sizes", "kinds", "stride"),
    [
        ([3, 3, 3], [CUBE] * 3, 1),
        ([3, 3, 3, 3], [CUBE] * 3 + [CROSS], 1),
        ([3, 3, 5], [CUBE, CUBE, CROSS], 2),
        ([2, 2, 4], [CUBE, CROSS, CUBE], 2),
        ([3, 1, 5], [CROSS, CROSS, CROSS], 1),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_hybrid(ME, sizes, kinds, stride, named):
    """Cube over some axes, cross over the others: offsets, order, volume, values, gradients."""
    if not named and len(set(kinds)) == 1:
        pytest.skip("axes that agree are that region")
    D = len(sizes)
    offsets = by_hand(sizes, kinds)
    options = {"region_type": ME.RegionType.HYBRID} if named else {}
    generator = ME.KernelGenerator(sizes, stride, 1, axis_types=kinds, dimension=D, **options)
    assert generator.kernel_volume == len(offsets) and generator.axis_types == kinds
    region, absolute, volume = generator.get_kernel([stride] * D, False)
    assert volume == len(offsets)
    assert absolute.tolist() == [[stride * c for c in offset] for offset in offsets]
    assert region == ME.RegionType.HYBRID == generator.region_type
    assert volume == ME.get_kernel_volume(region, sizes, None, kinds, D)
    coords, feats = scene(D, 2, seed=4)
    conv = ME.MinkowskiConvolution(2, 3, kernel_generator=generator, dimension=D).double()
    assert f"kernel_volume={volume}" in repr(conv)
    x = ME.SparseTensor(feats.requires_grad_(), coords)
    y = conv(x)
    want = lookup_conv(coords, feats, conv.kernel, offsets, y.C.tolist())
    checks.assert_close(y.F.detach(), want.detach(), torch.float64)
    grads = [torch.autograd.grad(part.square().sum(), (feats, conv.kernel)) for part in (y.F, want)]
    for mine, theirs in zip(*grads, strict=True):
        checks.assert_close(mine, theirs, torch.float64)
    up = ME.MinkowskiConvolutionTranspose(3, 2, kernel_generator=generator, dimension=D).double()
    assert up(y).coordinate_map_key == x.coordinate_map_key


def test_axes_that_agree_with_the_region_change_nothing(ME):
    plain = ME.KernelGenerator(3, dimension=2)
    for kind, region in ((CUBE, ME.RegionType.HYPER_CUBE), (CROSS, ME.RegionType.HYPER_CROSS)):
        given = ME.KernelGenerator(3, region_type=region, axis_types=[kind] * 2, dimension=2)
        assert given.region_type is region
        assert (given.region() is plain.region()) == (kind == CUBE)


def test_generative_layers_go_on_below_the_last_tensor_stride(ME):
    """Upstream divides tensor strides without a remainder: 3 -> 1 -> 0, where all offsets meet."""
    coords, feats = scene(2, 3, seed=5)
    coords[:, 1:] *= 3
    x = ME.SparseTensor(feats.requires_grad_(), coords, tensor_stride=3)
    kernel = {"kernel_size": 2, "stride": 2, "dimension": 2}
    up = ME.MinkowskiGenerativeConvolutionTranspose(3, 4, **kernel).double()
    last = ME.MinkowskiGenerativeConvolutionTranspose(4, 2, **kernel).double()
    y = up(x)
    assert y.tensor_stride == [1, 1] and len(y) == 4 * len(x)
    z = last(y)
    assert z.tensor_stride == [0, 0]
    assert sorted(z.C.tolist()) == sorted(y.C.tolist())
    mine, theirs = by_site(z), by_site(y)
    got, want = (torch.stack([rows[site] for site in mine]).detach() for rows in (mine, theirs))
    checks.assert_close(got, want @ last.kernel.detach().sum(0), torch.float64)
    # What follows keeps to those rows; a map 0 times coarser has a row per batch item.
    conv = ME.MinkowskiConvolution(2, 5, kernel_size=3, stride=2, dimension=2).double()
    w = conv(z)
    assert w.tensor_stride == [0, 0]
    strided = z.coordinate_manager.stride(x.coordinate_map_key, 0, "cells")
    found = z.coordinate_manager.get_coordinates(strided)
    assert sorted(found.tolist()) == [[0, 0, 0], [1, 0, 0]]
    (z.F.sum() + w.F.sum()).backward()
    assert feats.grad.isfinite().all() and last.kernel.grad.abs().sum() > 0
    # A transposed layer that comes back to a known map still refuses, as upstream.
    back = ME.MinkowskiConvolutionTranspose(4, 2, **kernel).double()
    with pytest.raises(RuntimeError, match="must divide"):
        back(y)


def test_a_convolution_of_a_globally_pooled_tensor(ME):
    coords, feats = scene(2, 3, seed=6)
    pooled = ME.MinkowskiGlobalPooling()(ME.SparseTensor(feats, coords))
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=3, bias=True, dimension=2).double()
    y = conv(pooled)
    assert y.coordinate_map_key == pooled.coordinate_map_key
    checks.assert_close(y.F.detach(), (pooled.F @ conv.kernel.sum(0) + conv.bias).detach(), torch.float64)
