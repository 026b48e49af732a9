"""MinkowskiEngine 0.4: its layers, autograd functions and helpers."""

from __future__ import annotations

import copy
import importlib

import numpy as np
import pytest
import torch

import sparse_bridge
from tests import checks

from .scenes import lookup_conv, scene
from .test_old_release import tensor


def test_layers_show_their_numbers(ME4):
    ME = ME4
    conv = ME.MinkowskiConvolution(3, 4, 3, 2, 1, True, None, dimension=2)
    assert conv.stride.tolist() == [2, 2] and conv.kernel_size.tolist() == [3, 3]
    assert conv.dilation.dtype == torch.int32 and conv.kernel_volume == 9 and conv.dimension == 2
    assert conv.region_type_ == ME.RegionType.HYPERCUBE and not conv.region_offset_.numel()
    assert conv.bias.shape == (1, 4)
    up = ME.MinkowskiConvolutionTranspose(3, 4, 2, 2, 1, False, True, dimension=2)
    assert up.kernel_generator.expand_coordinates and up.is_transpose
    pool = ME.MinkowskiSumPooling(2, 2, dimension=2)
    assert pool.stride.tolist() == pool.kernel_size.tolist() == [2, 2]
    with pytest.raises(AttributeError):
        conv.strides  # noqa: B018
    made = copy.deepcopy(conv)
    made.stride = "theirs"
    assert made.stride == "theirs" and conv.stride.tolist() == [2, 2]


def test_convolution_functions(ME4):
    ME = ME4
    x = tensor(ME)
    for size, options in ((3, {}), (3, {"region_type": ME.RegionType.HYPERCROSS})):
        generator = ME.KernelGenerator(size, 2, 1, dimension=2, **options)
        conv = ME.MinkowskiConvolution(
            3, 2, kernel_size=size, stride=2, kernel_generator=generator, dimension=2
        ).double()
        y = conv(x)
        arguments = (
            x.F,
            conv.kernel,
            x.tensor_stride,
            conv.stride,
            conv.kernel_size,
            conv.dilation,
            conv.region_type_,
            conv.region_offset_,
            x.coords_key,
            None,
            x.coords_man,
        )
        out = ME.MinkowskiConvolutionFunction().apply(*arguments)
        checks.assert_close(out.detach(), y.F.detach(), torch.float64)
        up = ME.MinkowskiConvolutionTranspose(
            2, 3, kernel_size=size, stride=2, kernel_generator=generator, dimension=2
        ).double()
        key = ME.CoordsKey(2)
        arguments = (
            y.F,
            up.kernel,
            y.tensor_stride,
            up.stride,
            up.kernel_size,
            up.dilation,
            up.region_type_,
            up.region_offset_,
        )
        for switch in ((), (False,)):
            out = ME.MinkowskiConvolutionTransposeFunction().apply(*arguments, *switch, y.coords_key, key, y.coords_man)
            assert key == x.coords_key
            checks.assert_close(out.detach(), up(y).F.detach(), torch.float64)
        fresh = ME.CoordsKey(2)
        ME.MinkowskiConvolutionTransposeFunction().apply(*arguments, True, y.coords_key, fresh, y.coords_man)
        assert fresh != x.coords_key


def test_listed_offsets_are_absolute(ME4):
    ME = ME4
    x = tensor(ME)
    kinds = [ME.RegionType.HYPERCUBE, ME.RegionType.HYPERCROSS]
    generator = ME.KernelGenerator(3, region_type=ME.RegionType.HYBRID, axis_types=kinds, dimension=2)
    conv = ME.MinkowskiConvolution(3, 2, kernel_generator=generator, dimension=2).double()
    arguments = (
        x.F,
        conv.kernel,
        x.tensor_stride,
        conv.stride,
        conv.kernel_size,
        conv.dilation,
        conv.region_type_,
        conv.region_offset_,
        x.coords_key,
        None,
        x.coords_man,
    )
    out = ME.MinkowskiConvolutionFunction.apply(*arguments)
    checks.assert_close(out.detach(), conv(x).F.detach(), torch.float64)
    offsets = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]
    want = lookup_conv(x.C, x.F.detach(), conv.kernel.detach(), offsets, x.C.tolist())
    checks.assert_close(out.detach(), want, torch.float64)
    wide = ME.SparseTensor(x.F, coords=x.C * torch.tensor([1, 2, 2]).int(), tensor_stride=2)
    with pytest.raises(AssertionError, match="absolute"):
        ME.MinkowskiConvolutionFunction.apply(
            wide.F, conv.kernel, wide.tensor_stride, *arguments[3:8], wide.coords_key, None, wide.coords_man
        )


@pytest.mark.parametrize("size", [2, 3])
def test_pooling_functions(ME4, size):
    ME = ME4
    x = tensor(ME)
    maximum = ME.MinkowskiMaxPooling(kernel_size=size, stride=2, dimension=2)
    mean = ME.MinkowskiAvgPooling(kernel_size=size, stride=2, dimension=2)
    total = ME.MinkowskiSumPooling(kernel_size=size, stride=2, dimension=2)

    def kernel(x, pool):
        return (
            x.F,
            x.tensor_stride,
            pool.stride,
            pool.kernel_size,
            pool.dilation,
            pool.region_type_,
            pool.region_offset_,
        )

    keys = x.coords_key, None, x.coords_man
    gradcheck = ME.utils.gradcheck.gradcheck
    for function, pool, average in (
        (ME.MinkowskiMaxPoolingFunction(), maximum, ()),
        (ME.MinkowskiAvgPoolingFunction(), mean, (True,)),
        (ME.MinkowskiAvgPoolingFunction(), total, (False,)),
    ):
        arguments = (*kernel(x, pool), *average, *keys)
        checks.assert_close(function.apply(*arguments).detach(), pool(x).F.detach(), torch.float64)
        assert gradcheck(function, arguments)
    y = total(x)
    back = ME.MinkowskiPoolingTranspose(kernel_size=size, stride=2, dimension=2)
    out = ME.MinkowskiPoolingTransposeFunction().apply(*kernel(y, back), False, y.coords_key, None, y.coords_man)
    checks.assert_close(out.detach(), back(y).F.detach(), torch.float64)


def test_global_layers(ME4):
    ME = ME4
    x = tensor(ME)
    mean, total = ME.MinkowskiGlobalPooling()(x), ME.MinkowskiGlobalPooling(False)(x)
    keys = x.coords_key, None, x.coords_man
    for mode in ME.GlobalPoolingMode:
        assert torch.equal(ME.MinkowskiGlobalPooling(mode=mode)(x).F, mean.F)
        assert torch.equal(ME.MinkowskiGlobalPooling(True, mode, dimension=2)(x).F, mean.F)
        assert torch.equal(ME.MinkowskiGlobalSumPooling(mode=mode)(x).F, total.F)
        function = ME.MinkowskiGlobalPoolingFunction()
        assert torch.equal(function.apply(x.F, True, mode, *keys), mean.F)
        assert torch.equal(function.apply(x.F, False, mode, *keys), total.F)
        norm = ME.MinkowskiInstanceNorm(3, mode).double()
        normed = ME.MinkowskiInstanceNormFunction().apply(x.F, mode, *keys)
        checks.assert_close(normed.detach(), norm(x).F.detach(), torch.float64)
    top = ME.MinkowskiGlobalMaxPoolingFunction().apply(x.F, *keys)
    assert torch.equal(top, ME.MinkowskiGlobalMaxPooling()(x).F)
    add, scale = ME.MinkowskiBroadcastAddition(), ME.MinkowskiBroadcastMultiplication()
    for layer, kind in ((add, ME.OperationType.ADDITION), (scale, ME.OperationType.MULTIPLICATION)):
        assert layer.operation_type == kind
        out = ME.MinkowskiBroadcastFunction().apply(x.F, mean.F, kind, x.coords_key, mean.coords_key, x.coords_man)
        assert torch.equal(out, layer(x, mean).F)
    back = ME.MinkowskiConvolution(3, 2, kernel_size=3, dimension=2).double()
    at = torch.tensor([[0, 1, 1], [1, 0, 0]]).int()
    assert back(x, coords=at).C.tolist() == at.tolist() == back(x, at).C.tolist()


def test_transposed_convolution_at_given_coordinates(ME4):
    """The plain formula; 0.5 labels such coordinates with a tensor stride of 0."""
    x = tensor(ME4)
    down = ME4.MinkowskiConvolution(3, 2, kernel_size=2, stride=2, dimension=2).double()
    up = ME4.MinkowskiConvolutionTranspose(2, 3, kernel_size=2, stride=2, dimension=2).double()
    y = down(x)
    whole, at = up(y), x.C[::3].contiguous()
    picked = up(y, at)
    assert picked.tensor_stride == [1, 1] and torch.equal(picked.C, at)
    checks.assert_close(picked.F.detach(), whole.F[::3].detach(), torch.float64)


# helpers


def test_the_modules_of_0_4(ME4):
    common = importlib.import_module("MinkowskiEngine.Common")
    coords = importlib.import_module("MinkowskiEngine.MinkowskiCoords")
    tensors = importlib.import_module("MinkowskiEngine.SparseTensor")
    assert common.KernelGenerator is ME4.KernelGenerator and coords.CoordsKey is ME4.CoordsKey
    assert tensors.SparseTensor is ME4.SparseTensor  # the class, although a module has its name
    assert importlib.import_module("MinkowskiCoords") is coords
    assert common.get_kernel_volume(common.RegionType.HYPERCROSS, 3, None, None, 3) == 7


def test_quantisation(ME4):
    ME, backend = ME4, importlib.import_module("MinkowskiEngineBackend")
    rng = np.random.default_rng(0)
    coords = (rng.random((2000, 3)) * 9).astype(np.int32)
    for unique, inverse in (
        backend.quantize_np(coords),
        backend.quantize_th(torch.from_numpy(coords)),
        ME.utils.sparse_quantize(coords, return_index=True, return_inverse=True),
    ):
        assert (coords[np.asarray(unique)][np.asarray(inverse)] == coords).all()
    labels = rng.integers(0, 3, 2000).astype(np.int32)
    unique, voted = backend.quantize_label_np(coords, labels, 255)
    assert len(np.unique(coords[unique], axis=0)) == len(np.unique(coords, axis=0)) == len(voted)
    assert (voted == 255).sum() > 3
    points, feats = rng.random((50, 3)), rng.random((50, 2))
    found = ME.utils.sparse_quantize(points, feats, quantization_size=0.5)
    assert all(isinstance(part, np.ndarray) for part in found) and found[0].dtype == np.int32
    found = ME.utils.sparse_quantize(torch.tensor(points), quantization_size=0.5)
    assert isinstance(found, torch.Tensor)
    sample = (torch.from_numpy(coords), torch.ones(2000, 1), torch.from_numpy(labels))
    batch = ME.utils.SparseCollation(is_double=True)([sample])
    assert batch[1].dtype == torch.float64


@pytest.mark.gpu
def test_coordinates_stay_on_the_cpu(ME4):
    coords, feats = scene(2, 3, seed=0)
    x = ME4.SparseTensor(feats.cuda().float(), coords=coords)
    y = ME4.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2).cuda()(x)
    assert y.F.is_cuda and not y.C.is_cuda and not x.coords_man.get_coords(1).is_cuda
    assert [len(c) for c in y.decomposed_coordinates] == [len(f) for f in y.decomposed_features]
    moved = ME4.SparseTensor(feats.float(), coords=coords)
    assert moved.to("cuda") is moved and moved.F.is_cuda and torch.equal(moved.C, coords)
    assert sparse_bridge.convert(y, to="core").coords.is_cuda and y.dense()[0].is_cuda
