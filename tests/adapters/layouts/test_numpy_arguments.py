"""A numpy array where a tensor belongs: one typed error, which says what is expected and how to get it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.core import functional
from sparse_bridge.errors import DataTypeError, TensorExpectedError
from tests.adapters.flex_gemm import test_bad_input as flex_gemm_calls

from .programs import APIS, CASES, PARAMETERS, SHAPE, edges, numbers, sites

MESSAGE = r": torch\.Tensor expected for \w+, got {}; torch\.{}\(\w+\) makes one\.$"
Calls = dict[str, Callable[[], Any]]


class Other:
    """An array of another library."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)


# What stands where a tensor belongs: how it is made of an array, its name, and what makes a tensor of it.
KINDS = {
    "array": (lambda array: array, r"numpy\.ndarray", "from_numpy"),
    "memmap": (lambda array: array.view(np.memmap), r"numpy(\.\w+)*\.memmap", "from_numpy"),
    "list": (lambda array: array.tolist(), "list", "tensor"),
    "tuple": (lambda array: tuple(array.tolist()), "tuple", "tensor"),
    "other": (Other, r"[\w.]*Other", "from_dlpack"),
}


def check(name: str, call: Callable[[], Any], kind: str = "array") -> None:
    try:
        call()
    except Exception as error:
        assert type(error) is TensorExpectedError, (name, error)
        assert re.search(MESSAGE.format(*KINDS[kind][1:]), str(error)), (name, error)
    else:
        raise AssertionError(f"{name}: no error")


OWN_SHAPES = ("torchsparse", "points"), ("functional", "kernel_map"), ("functional", "RelationalConv")  # or tuples


@pytest.mark.parametrize(
    ("api", "name", "kind"),
    [
        (*case, kind)
        for case in CASES
        for kind in KINDS
        if case[0] != "torch_geometric" and (kind == "array" or case not in OWN_SHAPES)
    ],
)
def test_programs(api, name, kind):
    enter, programs = APIS[api]
    program, tensors = programs[name]
    given = {key: torch.nn.Parameter(value) if key in PARAMETERS else value for key, value in tensors.items()}
    with enter() as module:
        program(module, **given)()
        for key in given:
            if key not in PARAMETERS:
                with_array = {**given, key: KINDS[kind][0](tensors[key].numpy())}
                check(key, lambda arguments=with_array: program(module, **arguments)(), kind)


def _spconv(sp: Any) -> Calls:
    x, array = sp.SparseConvTensor(numbers(40, 8), sites(), list(SHAPE), 2), numbers(40, 8).numpy()
    moved = sp.SparseConvTensor(numbers(40, 8), sites(), list(SHAPE), 2)
    moved.indices = sites().numpy()
    listed = sp.SparseConvTensor(numbers(40, 8), sites(), list(SHAPE), 2)
    listed.indices = None
    with pytest.raises(TensorExpectedError, match="expected for indices, got NoneType"):
        sp.SubMConv3d(8, 8, 3)(listed)
    with pytest.raises(DataTypeError, match=r"sparse_add takes SparseConvTensors, got ndarray"):
        importlib.import_module("spconv.pytorch.functional").sparse_add(x, array)
    return {
        "replace_feature": lambda: sp.SubMConv3d(8, 8, 3)(x.replace_feature(array)),
        "one offset": lambda: sp.SubMConv3d(8, 8, 1)(x.replace_feature(array)),
        "pool": lambda: sp.SparseMaxPool3d(2, 2)(x.replace_feature(array)),
        "features": lambda: setattr(x, "features", array),
        "indices": lambda: sp.SubMConv3d(8, 8, 3)(moved),
        "+=": lambda: x.__iadd__(array),
        "sum": lambda: x + array,
        "from_dense": lambda: sp.SparseConvTensor.from_dense(np.ones((1, 3, 3, 3, 2), np.float32)),
    }


def _spconv_standin(sp: Any) -> Calls:
    ops, utils = (importlib.import_module(f"spconv.pytorch.{name}") for name in ("ops", "utils"))
    one, shape = [1] * 3, list(SHAPE)

    def lists(indices: Any) -> Any:
        return ops.get_indice_pairs(indices, 2, shape, sp.ConvAlgo.Native, [3] * 3, one, one, one, [0] * 3, subm=True)

    _, pairs, counts = lists(sites())
    x, weight = numbers(40, 8), numbers(6, 3, 3, 3, 8)
    grid = utils.PointToVoxel([1.0] * 3, [0, 0, 0, 4, 4, 4], 4, 10, 5)
    table = importlib.import_module("spconv.pytorch.hash").HashTable(torch.device("cpu"), torch.int32, torch.int32, 64)
    return {
        **_spconv(sp),
        "pairs": lambda: lists(sites().numpy()),
        "conv of an array": lambda: ops.indice_conv(x.numpy(), weight, pairs, counts, 40, False, True),
        "conv by an array": lambda: ops.indice_conv(x, weight.numpy(), pairs, counts, 40, False, True),
        "conv over an array": lambda: ops.indice_conv(x, weight, pairs.numpy(), counts, 40, False, True),
        "pool of an array": lambda: ops.indice_maxpool(x.numpy(), pairs, counts, 40),
        "points": lambda: grid(np.ones((5, 4), np.float32)),
        "voxels": lambda: utils.gather_features_by_pc_voxel_id(x.numpy(), torch.zeros(3).long()),
        "voxel ids": lambda: utils.gather_features_by_pc_voxel_id(x, np.zeros(3, np.int64)),
        "keys": lambda: table.insert(np.arange(3, dtype=np.int32)),
    }


def _torchsparse(ts: Any) -> Calls:
    F, feats, coords = ts.nn.functional, numbers(40, 8), sites()
    array, rows = ts.SparseTensor(feats.numpy(), coords), ts.SparseTensor(feats, coords.numpy())
    x, weight = ts.SparseTensor(feats, coords), numbers(27, 8, 6)
    return {
        "weight": lambda: F.conv3d(x, weight.numpy(), 3),
        "bias": lambda: F.conv3d(x, weight, 3, np.ones(6, np.float32)),
        "ReLU": lambda: ts.nn.ReLU()(array),
        "BatchNorm": lambda: ts.nn.BatchNorm(8)(array),
        "GroupNorm": lambda: ts.nn.GroupNorm(2, 8)(array),
        "InstanceNorm": lambda: ts.nn.InstanceNorm(8)(array),
        "crop": lambda: F.spcrop(rows, (0, 0, 0), (2, 2, 2)),
        "cat": lambda: ts.cat([x, array]),
        "coarser": lambda: F.spdownsample(coords.numpy()),
        "moves": lambda: F.sphash(coords, np.zeros((2, 3), np.int32)),
        "positions": lambda: F.calc_ti_weights(coords.float().numpy(), torch.zeros(40, 8).int()),
        "grid": lambda: ts.nn.ToDenseBEVConvolution(8, 6, SHAPE)(array),
    }


def _minkowski(ME: Any) -> Calls:
    F, C = numbers(40, 8), sites()
    x, dense = ME.SparseTensor(F, C), np.ones((1, 2, 3, 3), np.float32)
    key, manager, rows = x.coordinate_map_key, x.coordinate_manager, torch.arange(3)
    spmm, size = ME.MinkowskiSPMMFunction.apply, torch.Size([3, 40])
    known = {"coordinate_map_key": key, "coordinate_manager": manager}
    return {
        "features": lambda: ME.SparseTensor(F.numpy(), **known),
        "insert": lambda: manager.insert_and_map(C.numpy(), 1),
        "field": lambda: manager.insert_field(C.float().numpy(), [1, 1, 1]),
        "given": lambda: ME.MinkowskiConvolution(8, 6, 3, dimension=3)(x, C.numpy()),
        "pooled": lambda: ME.MinkowskiMaxPooling(2, 2, dimension=3)(x, C.numpy()),
        "at": lambda: x.features_at_coordinates(C.float().numpy()),
        "weights": lambda: manager.interpolation_map_weight(key, C.float().numpy()),
        "to_sparse": lambda: ME.to_sparse(dense),
        "to_sparse_all": lambda: ME.to_sparse_all(dense),
        "a layer of it": lambda: ME.MinkowskiToSparseTensor()(dense),
        "least": lambda: x.dense(min_coordinate=np.zeros(3, np.int32)),
        "entries": lambda: spmm(rows.numpy(), rows, torch.ones(3), size, F),
        "matrix": lambda: spmm(rows, rows, torch.ones(3), size, F.numpy()),
        "sum": lambda: x + F.numpy(),
        "unique": lambda: ME.utils.unique_coordinate_map(C.numpy()),
    }


def _functional(F: Any) -> Calls:
    voxels, x, weight = F.coordinate_map(sites(), SHAPE, 2), numbers(40, 8), numbers(27, 8, 6)
    same, made = F.submanifold(voxels, F.kernel_offsets((3, 3, 3))), edges()
    graph = F.relation_map(made["edges"], made["kinds"], 3, 40)
    return {
        "weight": lambda: F.conv(x, weight.numpy(), None, same),
        "bias": lambda: F.conv(x, weight, np.ones(6, np.float32), same),
        "residual": lambda: F.conv(x, weight, None, same, residual=numbers(40, 6).numpy()),
        "batch": lambda: F.global_pool(x, sites()[:, 0].numpy(), 2, "avg"),
        "kinds": lambda: F.relation_map(made["edges"], made["kinds"].numpy(), 3, 40),
        "relations": lambda: F.relational_conv(x, numbers(3, 8, 6).numpy(), graph),
    }


FUNCTIONS = {
    "spconv": _spconv_standin,
    "spconv patched": _spconv,
    "torchsparse": _torchsparse,
    "minkowski": _minkowski,
    "functional": _functional,
}


@pytest.mark.parametrize("api", FUNCTIONS)
def test_functions(api):
    with APIS[api][0]() as module:
        for name, call in FUNCTIONS[api](module).items():
            check(name, call)


@pytest.mark.parametrize("profile", ["1", "2.0"])
def test_flex_gemm(profile):
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile=profile):
        package = importlib.import_module("flex_gemm")
        calls = flex_gemm_calls.first() if profile == "1" else flex_gemm_calls.second()
        for path, arguments in calls.items():
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor) and name not in ("offsets", "kernel_delta"):
                    with_array = {**arguments, name: value.numpy()}
                    check(f"{path} {name}", lambda p=path, a=with_array: flex_gemm_calls.call(package, p, a))


def test_what_the_error_is():
    """`except` for what frameworks raise here keeps working; lists and others are named, too."""
    for kind in (TypeError, AssertionError, AttributeError):
        assert issubclass(TensorExpectedError, kind)
    for value, words in (([[0, 1]], "got list; torch.tensor(coords) makes one"), (None, "got NoneType; pass a tensor")):
        with pytest.raises(TensorExpectedError, match=re.escape(words)):
            functional.coordinate_map(value)
