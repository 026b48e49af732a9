"""Names of MinkowskiEngine 0.4 in its modules, and what its objects show."""

from __future__ import annotations

import copy
import importlib
import os
import types

import pytest
import torch

import sparse_bridge
from sparse_bridge.errors import ContractError

from .test_old_release import tensor


def module(name):
    return importlib.import_module(f"MinkowskiEngine.{name}")


def test_names_of_modules(ME4):
    coords, pools, tensors = (module(n) for n in ("MinkowskiCoords", "MinkowskiPooling", "SparseTensor"))
    assert os.cpu_count() == coords.CPU_COUNT and coords.save_ctx is module("Common").save_ctx
    for name in ("Avg", "Max", "GlobalMax"):
        assert getattr(pools, f"Minkowski{name}PoolingFunction") is getattr(ME4, f"Minkowski{name}PoolingFunction")
    assert pools.MinkowskiPoolingTransposeFunction is ME4.MinkowskiPoolingTransposeFunction
    assert ME4.utils.get_coords_map is module("utils.coords").get_coords_map
    backend = importlib.import_module("MinkowskiEngineBackend")
    assert backend.CUDA is ME4.MemoryManagerBackend.CUDA
    ME4.set_memory_manager_backend(backend.PYTORCH)
    x, y = tensor(ME4), tensor(ME4)
    with pytest.raises(AssertionError) as raised:
        x + y
    assert tensors.COORDS_MAN_DIFFERENT_ERROR in str(raised.value)
    z = ME4.MinkowskiConvolution(3, 3, kernel_size=2, stride=2, dimension=2).double()(x)
    with pytest.raises(AssertionError) as raised:
        x += z
    assert tensors.COORDS_KEY_DIFFERENT_ERROR in str(raised.value)


def test_what_a_backward_pass_keeps(ME4):
    ctx = types.SimpleNamespace()
    given = (1, 2, 3, 4, ME4.RegionType.HYPERCUBE, "in", "out", "manager")
    assert module("MinkowskiCoords").save_ctx(ctx, *given) is ctx
    assert (ctx.tensor_stride, ctx.stride, ctx.kernel_size, ctx.dilation) == (1, 2, 3, 4)
    assert (ctx.in_coords_key, ctx.out_coords_key, ctx.coords_man) == ("in", "out", "manager")


def test_names_of_broadcasts(ME4):
    broadcasts = module("MinkowskiBroadcast")
    kinds = broadcasts.OperationType
    assert kinds is ME4.OperationType
    assert [broadcasts.operation_type_to_int(kind) for kind in kinds] == [0, 1]
    assert broadcasts.op_to_int[kinds.MULTIPLICATION] == 1 and len(broadcasts.op_to_int) == 2
    with pytest.raises(ContractError, match="OperationType"):
        broadcasts.operation_type_to_int(1)
    x = tensor(ME4)
    glob = ME4.MinkowskiGlobalPooling()(x)
    for kind, layer in zip(
        kinds, (ME4.MinkowskiBroadcastAddition(), ME4.MinkowskiBroadcastMultiplication()), strict=True
    ):
        made = broadcasts.AbstractMinkowskiBroadcast(kind)
        assert isinstance(layer, broadcasts.AbstractMinkowskiBroadcast)
        assert made.operation_type == kind and torch.equal(made(x, glob).F, layer(x, glob).F)


def test_the_base_of_activations():
    """In 0.5 the module has the base of all layers under this name."""
    with sparse_bridge.enable("minkowski", profile="0.4"):
        base = module("MinkowskiNonlinearity").MinkowskiModuleBase

        class Doubled(base):
            MODULE = torch.nn.Softplus

        ME = importlib.import_module("MinkowskiEngine")
        x, layer = tensor(ME), Doubled(2)
        assert layer.module.beta == 2 and isinstance(ME.MinkowskiReLU(), base)
        assert torch.equal(layer(x).F, torch.nn.functional.softplus(x.F, 2))
    with sparse_bridge.enable("minkowski", profile="0.5"):
        found = module("MinkowskiNonlinearity").MinkowskiModuleBase
        ME = importlib.import_module("MinkowskiEngine")
        assert found is ME.MinkowskiModuleBase and issubclass(ME.MinkowskiConvolution, found)
        with pytest.raises(AttributeError, match="MinkowskiOther"):
            module("MinkowskiNonlinearity").MinkowskiOther  # noqa: B018


def test_what_layers_show(ME4):
    ME = ME4
    conv = ME.MinkowskiConvolution(3, 4, 3, 2, 1, True, None, dimension=2)
    assert conv.has_bias and conv.kernel_shape == (9, 3, 4) and not conv.use_mm
    assert not ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2).has_bias
    point = ME.MinkowskiConvolution(3, 4, kernel_size=1, dimension=2)
    assert point.use_mm and point.kernel_shape == (3, 4)
    channels = ME.MinkowskiChannelwiseConvolution(3, 1, has_bias=True, dimension=2)
    assert channels.has_bias and channels.kernel_shape == (1, 3) and not channels.use_mm
    assert not ME.MinkowskiChannelwiseConvolution(3, 3, dimension=2).has_bias
    for value in (False, True):
        up = ME.MinkowskiConvolutionTranspose(3, 4, 2, 2, generate_new_coords=value, dimension=2)
        assert up.generate_new_coords is value and copy.deepcopy(up).generate_new_coords is value
    kernel = ME.KernelGenerator(3, [2, 1], 4, dimension=2)
    assert kernel.stride == [2, 1] == kernel.kernel_stride and kernel.dilation == [4, 4]
    with pytest.raises(AttributeError):
        ME.MinkowskiSumPooling(2, 2, dimension=2).has_bias  # noqa: B018


def test_what_pools_and_norms_show(ME4):
    ME = ME4
    size = {"kernel_size": 2, "stride": 2, "dimension": 2}
    assert ME.MinkowskiAvgPooling(**size).average and not ME.MinkowskiSumPooling(**size).average
    assert not ME.MinkowskiMaxPooling(**size).average
    assert not ME.MinkowskiPoolingTranspose(**size).average
    base = module("MinkowskiPooling").MinkowskiPoolingBase
    for average in (False, True):
        assert base(**size, average=average).average is average
        pool = ME.MinkowskiGlobalPooling(average)
        assert pool.average is average and pool.mode is ME.GlobalPoolingMode.AUTO
    sparse = ME.GlobalPoolingMode.SPARSE
    assert ME.MinkowskiGlobalPooling(True, sparse).mode is sparse
    assert ME.MinkowskiGlobalAvgPooling(sparse).mode is sparse
    norm = ME.MinkowskiInstanceNorm(3, sparse)
    assert norm.mode is sparse and ME.MinkowskiInstanceNorm(3).mode is ME.GlobalPoolingMode.AUTO
    assert ME.MinkowskiStableInstanceNorm(3).eps == 1e-6
    with pytest.raises(ContractError, match="GlobalPoolingMode"):
        ME.MinkowskiInstanceNorm(3, 7)


def test_coords_by_name_and_place_in_pools(ME4):
    ME, x = ME4, tensor(ME4)
    at = x.C[:2].contiguous()
    layers = [
        ME.MinkowskiMaxPooling(3, dimension=2),
        ME.MinkowskiPoolingTranspose(3, 1, dimension=2),
        ME.MinkowskiConvolutionTranspose(3, 2, kernel_size=3, dimension=2).double(),
    ]
    for layer in layers:
        named, placed = layer(x, coords=at), layer(x, at)
        assert named.C.tolist() == at.tolist() == placed.C.tolist()
        assert torch.equal(named.F, placed.F)


def test_the_stride_of_a_tensor_is_set_by_name(ME4):
    x = ME4.SparseTensor(torch.ones(2, 1), coords=torch.tensor([[0, 0, 0], [0, 2, 2]]).int())
    x.set_tensor_stride(s=2)
    assert x.tensor_stride == [2, 2] and x.C.tolist() == [[0, 0, 0], [0, 2, 2]]


def test_checks_of_gradients_by_place(ME4):
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    check = ME4.utils.gradcheck.gradcheck
    assert check(torch.sin, (x,), 1e-6, 1e-5, 1e-3, True, False, 0.0)
    assert not check(lambda x: x.detach() * x, (x,), 1e-6, 1e-5, 1e-3, False)
