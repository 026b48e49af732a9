"""Bad input: one typed error each, of the built-in kind that MinkowskiEngine raises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_bridge.adapters.minkowski import geometry
from sparse_bridge.errors import LifecycleError, SettingError, SparseBridgeError

F, C = torch.randn(4, 3), torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]).int()


def conv(ME, **options):
    return ME.MinkowskiConvolution(3, 4, **{"kernel_size": 3, "dimension": 2, **options})


def strided(ME, x):
    return conv(ME, kernel_size=2, stride=2)(x)


CASES = [
    # construction of tensors
    ("features", AssertionError, lambda ME, x: ME.SparseTensor(F.tolist(), C)),
    (r"\[N, C\]", AssertionError, lambda ME, x: ME.SparseTensor(F[0], C)),
    ("needs coordinates", ValueError, lambda ME, x: ME.SparseTensor(F)),
    ("not both", AssertionError, lambda ME, x: ME.SparseTensor(F, C, coordinate_map_key=x.coordinate_map_key)),
    ("give both", AssertionError, lambda ME, x: ME.SparseTensor(F, coordinate_map_key=x.coordinate_map_key)),
    (
        "not set",
        AssertionError,
        lambda ME, x: ME.SparseTensor(
            F, coordinate_map_key=ME.CoordinateMapKey(3), coordinate_manager=x.coordinate_manager
        ),
    ),
    ("both must have N rows", AssertionError, lambda ME, x: ME.SparseTensor(F[1:], C)),
    ("batch index first", AssertionError, lambda ME, x: ME.SparseTensor(F, C[:, :1])),
    ("not finite", ValueError, lambda ME, x: ME.SparseTensor(F, C.float() * float("nan"))),
    ("32-bit", ValueError, lambda ME, x: ME.SparseTensor(F, C.long() * (1 << 40))),
    (
        "axes",
        AssertionError,
        lambda ME, x: ME.SparseTensor(F, torch.cat([C, C[:, :1]], 1), coordinate_manager=x.coordinate_manager),
    ),
    ("entries", AssertionError, lambda ME, x: ME.SparseTensor(F, C, tensor_stride=[1, 1, 1])),
    ("unexpected keyword", TypeError, lambda ME, x: ME.SparseTensor(F, C, colour="red")),
    (
        "does not merge",
        ValueError,
        lambda ME, x: ME.SparseTensor(F, C * 0, quantization_mode=ME.SparseTensorQuantizationMode.NO_QUANTIZATION),
    ),
    ("D=0", ValueError, lambda ME, x: ME.CoordinateManager()),
    (
        "batch index -1",
        ValueError,
        lambda ME, x: ME.SparseTensor(F, C - torch.tensor([1, 0, 0]).int()).decomposed_features,
    ),
    # layers: construction
    ("dimension", TypeError, lambda ME, x: ME.MinkowskiConvolution(3, 4, kernel_size=3)),
    ("dimension", AssertionError, lambda ME, x: ME.MinkowskiMaxPooling(2, 2)),
    ("dimension", AssertionError, lambda ME, x: ME.MinkowskiChannelwiseConvolution(3, kernel_size=3)),
    ("kernel_size", AssertionError, lambda ME, x: ME.MinkowskiConvolution(3, 4, dimension=2)),
    ("entries", AssertionError, lambda ME, x: conv(ME, kernel_size=[3, 3, 3])),
    ("kernel_stride", AssertionError, lambda ME, x: conv(ME, stride=0)),
    ("odd", AssertionError, lambda ME, x: ME.KernelGenerator(2, region_type=ME.RegionType.HYPER_CROSS, dimension=2)),
    (
        "region_offsets",
        AssertionError,
        lambda ME, x: ME.KernelGenerator(3, region_type=ME.RegionType.CUSTOM, dimension=2),
    ),
    (
        "different offsets",
        AssertionError,
        lambda ME, x: ME.KernelGenerator(
            3, region_type=ME.RegionType.CUSTOM, region_offsets=[[0, 0], [0, 0]], dimension=2
        ),
    ),
    ("axis_types", AssertionError, lambda ME, x: ME.KernelGenerator(3, axis_types=[0, 1, 0], dimension=2)),
    (
        "axis_types",
        AssertionError,
        lambda ME, x: ME.KernelGenerator(3, region_type=ME.RegionType.HYPER_CROSS, axis_types=[0, 1], dimension=2),
    ),
    ("axis_types", AssertionError, lambda ME, x: ME.KernelGenerator(3, region_type=ME.RegionType.HYBRID, dimension=2)),
    ("PoolingMode", AssertionError, lambda ME, x: ME.MinkowskiGlobalPooling(mode="avg")),
    # layers: calls
    ("takes a SparseTensor", AssertionError, lambda ME, x: conv(ME)(F)),
    ("dimension 3", AssertionError, lambda ME, x: conv(ME, dimension=3)(x)),
    ("takes 5 channels", RuntimeError, lambda ME, x: ME.MinkowskiConvolution(5, 4, kernel_size=3, dimension=2)(x)),
    ("takes 5 channels", RuntimeError, lambda ME, x: ME.MinkowskiConvolution(5, 4, kernel_size=1, dimension=2)(x)),
    ("float64", RuntimeError, lambda ME, x: conv(ME).double()(x)),
    ("float16", RuntimeError, lambda ME, x: conv(ME, kernel_size=1).half()(x)),
    ("floating point", RuntimeError, lambda ME, x: conv(ME)(x._with(x.F.int()))),
    ("4 rows", RuntimeError, lambda ME, x: conv(ME)(x._with(x.F[1:]))),
    ("expected an IntTensor", AssertionError, lambda ME, x: conv(ME)(x, "somewhere")),
    ("int32", RuntimeError, lambda ME, x: conv(ME)(x, C.float())),
    ("same coordinate manager", AssertionError, lambda ME, x: conv(ME)(x, ME.SparseTensor(F, C))),
    (
        "must divide",
        RuntimeError,
        lambda ME, x: ME.MinkowskiConvolutionTranspose(3, 4, kernel_size=2, stride=2, dimension=2)(x),
    ),
    (
        "tensor stride 0",
        RuntimeError,
        lambda ME, x: ME.MinkowskiSumPooling(3, dimension=2)(ME.MinkowskiGlobalPooling()(x)),
    ),
    ("mask of shape", RuntimeError, lambda ME, x: ME.MinkowskiPruning()(x, torch.ones(3, dtype=torch.bool))),
    ("uint8", RuntimeError, lambda ME, x: ME.MinkowskiPruning()(x, torch.ones(4, dtype=torch.uint8))),
    ("two or more", AssertionError, lambda ME, x: ME.MinkowskiUnion()(x)),
    ("one coordinate manager", AssertionError, lambda ME, x: ME.MinkowskiUnion()(x, ME.SparseTensor(F, C))),
    ("channels", RuntimeError, lambda ME, x: ME.MinkowskiUnion()(x, x._with(x.F[:, :2]))),
    (
        "channels",
        RuntimeError,
        lambda ME, x: ME.MinkowskiBroadcastAddition()(x, ME.MinkowskiGlobalPooling()(x._with(x.F[:, :2]))),
    ),
    (
        "one row per batch",
        ValueError,
        lambda ME, x: ME.MinkowskiBroadcast()(x, ME.MinkowskiPruning()(x, torch.tensor([True, False, False, False]))),
    ),
    ("takes a SparseTensor or TensorField", AssertionError, lambda ME, x: ME.MinkowskiReLU()(F)),
    ("takes a SparseTensor or TensorField", AssertionError, lambda ME, x: ME.MinkowskiBatchNorm(3)(F)),
    # joins and arithmetic
    ("two or more", AssertionError, lambda ME, x: ME.cat(x)),
    ("expected SparseTensors", ValueError, lambda ME, x: ME.cat(x, F)),
    (r"\[1, 1\].*\[2, 2\]", AssertionError, lambda ME, x: ME.cat(x, strided(ME, x))),
    ("same coordinate manager", AssertionError, lambda ME, x: x + ME.SparseTensor(F, C)),
    ("torch.Tensor", AssertionError, lambda ME, x: x + 1),
    ("coordinate_map_key", AssertionError, lambda ME, x: x.__iadd__(strided(ME, x)._with(F))),
    ("in-place", AssertionError, lambda ME, x: x.__iadd__(F)),
    ("do not combine", RuntimeError, lambda ME, x: x + strided(ME, x)),
    # positions, dense forms
    ("one dtype", AssertionError, lambda ME, x: x.features_at_coordinates(C.double())),
    ("batch index first", AssertionError, lambda ME, x: x.features_at_coordinates(F[:, :2])),
    ("finite", ValueError, lambda ME, x: x.features_at_coordinates(F * float("inf"))),
    ("one dtype", RuntimeError, lambda ME, x: ME.MinkowskiInterpolation()(x, C.double())),
    ("min_coordinate", ValueError, lambda ME, x: ME.SparseTensor(F, C - 1).dense()),
    ("torch.Size", AssertionError, lambda ME, x: x.dense([2, 3, 2, 2])),
    ("IntTensor", AssertionError, lambda ME, x: x.dense(min_coordinate=0)),
    ("multiple", AssertionError, lambda ME, x: strided(ME, x).dense(min_coordinate=torch.IntTensor([-1, 0]))),
    ("larger shape", IndexError, lambda ME, x: x.dense(torch.Size([2, 3, 1, 1]))),
    ("larger shape", IndexError, lambda ME, x: x.dense(min_coordinate=torch.IntTensor([1, 1]))),
    ("needs a shape", AssertionError, lambda ME, x: x._with(F[:0]).dense()),
    ("min_coords", IndexError, lambda ME, x: x.sparse(max_coords=torch.IntTensor([0, 0]))),
    ("exactly one C", AssertionError, lambda ME, x: ME.to_sparse(torch.ones(2, 3, 4), "BXX")),
    ("dense tensor", ValueError, lambda ME, x: ME.MinkowskiToSparseTensor()(x)),
    # the manager
    ("not set", RuntimeError, lambda ME, x: ME.CoordinateMapKey(3).get_key()),
    ("no coordinate map", RuntimeError, lambda ME, x: x.coordinate_manager.size(ME.CoordinateMapKey([7, 7], ""))),
    ("tensor stride", AssertionError, lambda ME, x: x.coordinate_manager.get_coordinates(9)),
    ("int32", RuntimeError, lambda ME, x: x.coordinate_manager.insert_and_map(C.long())),
    ("columns", AssertionError, lambda ME, x: x.coordinate_manager.insert_and_map(C[:, :2])),
    ("OperationMode", AssertionError, lambda ME, x: ME.set_sparse_tensor_operation_mode(1)),
    ("AllocatorType", AssertionError, lambda ME, x: ME.set_gpu_allocator("cuda")),
    # utilities
    ("array or a tensor", AssertionError, lambda ME, x: ME.utils.sparse_quantize([[0, 1]])),
    ("return_index", AssertionError, lambda ME, x: ME.utils.sparse_quantize(F, return_inverse=True)),
    ("entries", AssertionError, lambda ME, x: ME.utils.sparse_quantize(F, quantization_size=[1, 2])),
    ("number", ValueError, lambda ME, x: ME.utils.sparse_quantize(F, quantization_size="x")),
    ("int32", RuntimeError, lambda ME, x: ME.utils.sparse_quantize(F, labels=torch.ones(4))),
    ("features for", AssertionError, lambda ME, x: ME.utils.sparse_quantize(F, features=F[1:])),
    ("dtype", AssertionError, lambda ME, x: ME.utils.batched_coordinates([C], dtype=torch.int64)),
    ("rows of features", AssertionError, lambda ME, x: ME.utils.sparse_collate([C], [F[1:]])),
    ("no samples", AssertionError, lambda ME, x: ME.utils.sparse_collate([], [])),
    ("no samples", AssertionError, lambda ME, x: ME.utils.batch_sparse_collate([])),
    ("no samples", AssertionError, lambda ME, x: ME.utils.SparseCollation()([])),
    # channels
    ("in_channels=0", AssertionError, lambda ME, x: ME.MinkowskiConvolution(0, 4, kernel_size=3, dimension=2)),
    ("out_channels=-4", AssertionError, lambda ME, x: ME.MinkowskiConvolution(3, -4, kernel_size=3, dimension=2)),
    (
        "out_channels=0",
        AssertionError,
        lambda ME, x: ME.MinkowskiConvolutionTranspose(3, 0, kernel_size=3, dimension=2),
    ),
    ("in_channels=0", AssertionError, lambda ME, x: ME.MinkowskiChannelwiseConvolution(0, kernel_size=3, dimension=2)),
    ("mode", ValueError, lambda ME, x: ME.utils.kaiming_normal_(torch.ones(2, 2), mode="fan")),
    ("vals", ValueError, lambda ME, x: ME.spmm(C[:, 1], C[:, 2], C[:, 0], [4, 4], F)),
    ("leave the matrix", RuntimeError, lambda ME, x: ME.spmm(C[:, 1] + 9, C[:, 2], F[:, 0], [4, 4], F)),
]


@pytest.mark.parametrize(("text", "kind", "call"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_bad_input(ME, text, kind, call):
    x = ME.SparseTensor(F.clone(), C.contiguous())
    with pytest.raises(kind, match=text) as caught:
        call(ME, x)
    assert isinstance(caught.value, SparseBridgeError)
    assert len(str(caught.value)) > 25


def test_unknown_options():
    import sparse_bridge

    with pytest.raises(SettingError, match="minkowski"):
        sparse_bridge.enable("minkowsky")
    with pytest.raises(LifecycleError, match="cannot be patched"):
        sparse_bridge.enable("minkowski", mode="patch")


@pytest.mark.gpu
def test_wrong_devices(ME):
    x = ME.SparseTensor(F.cuda(), C.cuda())
    layer = conv(ME)
    with pytest.raises(RuntimeError, match="cuda"):
        layer(x)
    with pytest.raises(AssertionError, match="device="):
        ME.SparseTensor(F, C.cuda())
    with pytest.raises(TypeError, match=r"coordinates on cpu for a coordinate manager of .*CUDA"):
        ME.SparseTensor(F, C, coordinate_manager=x.coordinate_manager)
    with pytest.raises(AssertionError, match="positions are on cpu"):
        x.features_at_coordinates(C.float())
    with pytest.raises(TypeError, match="mask on cpu"):
        ME.MinkowskiPruning()(x, torch.ones(4, dtype=torch.bool))
    y = ME.SparseTensor(F, C, device="cuda")
    assert y.F.is_cuda and y.C.is_cuda and layer.cuda()(y).F.is_cuda
    assert y.to("cpu").F.device.type == "cpu"


def test_whole_numbers_of_every_kind():
    numbers = [2, 2.0, np.int64(2), torch.tensor(2), True]
    assert geometry.int_list(numbers, 5) == [2, 2, 2, 2, 1]
    for wrong in (2.5, "2", float("inf"), None):
        with pytest.raises(geometry.ArgumentValueError):
            geometry.int_list([wrong, 1], 2)
