"""Switches of MinkowskiEngine without meaning: results for each of their values."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from sparse_bridge.errors import ContractError

from .switch_effects import COORDS, FEATS, backend, pooled, tensor


def convolved(ME, x, **options):
    torch.manual_seed(0)
    conv = ME.MinkowskiConvolution(2, 3, kernel_size=3, stride=2, dimension=2, **options)
    return conv(x).F.detach()


def allocators(ME):
    kinds, old = ME.GPUMemoryAllocatorType, ME.MemoryManagerBackend
    for kind in kinds:
        ME.set_gpu_allocator(kind)
        with pytest.warns(DeprecationWarning):
            ME.set_memory_manager_backend(kind)
        yield convolved(ME, tensor(ME, allocator_type=kind))
        assert type(ME.CoordinateManager(D=2, allocator_type=kind)._manager) is type(ME.CoordinateManager(D=2)._manager)
    for kind in old:
        ME.set_memory_manager_backend(kind)
        yield convolved(ME, tensor(ME, memory_manager_backend=kind))
        assert ME.CoordsManager(memory_manager_backend=kind, D=2).D == 2
    for wrong in (
        lambda: ME.set_gpu_allocator(old.CUDA),
        lambda: ME.CoordinateManager(D=2, allocator_type=1),
        lambda: ME.CoordsManager(-1, "PYTORCH", 2),
    ):
        with pytest.raises(ContractError, match="GPUMemoryAllocatorType"):
            wrong()


def algorithms(ME):
    for algorithm in ME.MinkowskiAlgorithm:
        x = tensor(ME, minkowski_algorithm=algorithm)
        assert x.coordinate_manager.minkowski_algorithm is algorithm
        yield convolved(ME, x)
        field = ME.TensorField(FEATS, COORDS.float(), minkowski_algorithm=algorithm)
        yield convolved(ME, field.sparse())
    with pytest.raises(ContractError, match="MinkowskiAlgorithm"):
        tensor(ME, minkowski_algorithm=1)


def convolution_modes(ME):
    for mode in backend().ConvolutionMode:
        yield convolved(ME, tensor(ME), convolution_mode=mode)
    with pytest.raises(ContractError, match="ConvolutionMode"):
        convolved(ME, tensor(ME), convolution_mode=1)


def threads(ME):
    for number in (-1, 1, 7):
        manager = ME.CoordinateManager(D=2, num_threads=number)
        assert manager.num_threads == number or number < 0
        yield convolved(ME, tensor(ME, coordinate_manager=manager))


def ways_to_average(ME):
    x = tensor(ME)
    for mode in ME.GlobalPoolingMode:
        yield pooled(ME, ME.MinkowskiGlobalPooling(mode=mode))
        yield pooled(ME, ME.MinkowskiGlobalAvgPooling(mode=mode))
    norms = [pooled(ME, ME.MinkowskiInstanceNorm(2, mode=mode)) for mode in ME.GlobalPoolingMode]
    norms += [
        ME.MinkowskiInstanceNormFunction.apply(FEATS, x.coordinate_map_key, None, x.coordinate_manager, mode)
        for mode in ME.PoolingMode
    ]
    for norm in norms:
        assert torch.equal(norm, norms[0])


def transposed_pools(ME):
    x = ME.MinkowskiSumPooling(2, 2, dimension=2)(tensor(ME))
    kernel = ME.KernelGenerator(2, 2, is_transpose=True, dimension=2)
    keys = x.coordinate_map_key, None, x.coordinate_manager
    for mode in ME.PoolingMode:
        yield ME.MinkowskiLocalPoolingTransposeFunction.apply(x.F, mode, kernel, *keys)


def products(ME):
    entries = torch.tensor([2, 0, 1]), torch.tensor([1, 3, 0])
    given = (*entries, torch.ones(3), [3, 4], FEATS)
    for is_sorted in (False, True):
        for algorithm in (0, 1, 4):
            yield ME.spmm(*given, is_sorted=is_sorted, cuda_spmm_alg=algorithm)
            yield ME.MinkowskiSPMMFunction.apply(*given, algorithm)
            yield ME.MinkowskiSPMMAverageFunction.apply(*entries, [3, 4], FEATS, algorithm)
        yield ME.MinkowskiDirectMaxPoolingFunction.apply(entries[1], entries[0], FEATS, 3, is_sorted)


def coordinates(ME):
    x, other = tensor(ME), torch.tensor([[0, 9, 9]]).int()
    layer = ME.MinkowskiChannelwiseConvolution(2, 3, dimension=2)
    assert torch.equal(layer(x).F, layer(x, coords=other).F)
    dense = torch.eye(3)[None, None]
    assert torch.equal(ME.to_sparse(dense).C, ME.to_sparse(dense, coordinates=other).C)
    chosen = importlib.import_module("MinkowskiEngine.MinkowskiSparseTensor")
    for expand in (False, True):
        found = chosen._get_coordinate_map_key(x, None, 1, expand_coordinates=expand)
        assert not found.is_key_set()
    for given in (None, other):
        yield ME.MinkowskiGlobalSumPooling()(x, coordinates=given).F


def labels_of_strides(ME):
    for stride in (1, 2, [4, 4]):
        yield torch.stack(ME.utils.unique_coordinate_map(COORDS, tensor_stride=stride))


def directions(ME):
    for value in (False, True):
        kernel = ME.KernelGenerator(3, 2, is_transpose=value, dimension=2)
        yield convolved(ME, tensor(ME), kernel_generator=kernel)
        yield convolved(ME, tensor(ME, is_transpose=value))
    kernels = []
    for given in ((), (False,), (True,)):
        layer = ME.MinkowskiChannelwiseConvolution(2, 3, dimension=2)
        torch.manual_seed(0)
        layer.reset_parameters(*given)
        kernels.append(layer.kernel.detach())
    assert all(torch.equal(kernel, kernels[0]) for kernel in kernels)


def dimensions(ME):
    senet = importlib.import_module("MinkowskiEngine.modules.senet_block")
    assert senet.SELayer(16, D=2).fc[0].linear.out_features == 1
    for options in ({}, {"dimension": 2}, {"D": 7}):
        assert torch.equal(
            pooled(ME, ME.MinkowskiBatchNorm(2, **options)).detach(), pooled(ME, ME.MinkowskiBatchNorm(2)).detach()
        )
        norm = pooled(ME, ME.MinkowskiInstanceNorm(2, **options))
        assert torch.equal(norm, pooled(ME, ME.MinkowskiInstanceNorm(2)))
        x = tensor(ME)
        glob = ME.MinkowskiGlobalSumPooling(**options)(x)
        kept = ME.MinkowskiPruning(**options)(x, torch.ones(4, dtype=torch.bool))
        assert torch.equal(kept.F, x.F)
        yield ME.MinkowskiBroadcastAddition(**options)(x, glob).F


def creation(ME):
    coords = torch.cat([COORDS, COORDS[:1]])
    for value in (False, True):
        options = {"force_creation": value, "allow_duplicate_coords": value}
        yield ME.SparseTensor(torch.ones(5, 1), coords, **options).C
        manager, made = ME.CoordsManager(D=2), ME.CoordsKey(2)
        manager.initialize(coords, made, force_remap=value, **options)
        yield manager.get_coords(made)
        yield manager.get_coords(manager.create_coords_key(coords, 1, value, value, value))


def origin_keys(ME):
    manager = tensor(ME).coords_man
    for origin in (None, manager.reduce()):
        yield torch.cat(manager.get_row_indices_per_batch(manager.get_coords_key(1), origin))


def inverses(ME):
    ME.CoordsKey(1)  # 0.4
    points, labels = np.array([[0, 0], [0, 1]]), np.array([3, 3], np.int32)
    for value in (False, True):
        found = ME.utils.sparse_quantize(points, labels=labels, return_index=True, return_inverse=value)
        yield torch.from_numpy(np.concatenate(found))


def of_older_releases(ME):
    check = ME.utils.gradcheck.gradcheck
    for value in (False, True):
        assert check(torch.sin, (FEATS.double().requires_grad_(),), check_sparse_nnz=value)
    for value in ("ravel", "fnv"):
        yield torch.as_tensor(ME.utils.sparse_quantize(COORDS, hash_type=value))


WITHOUT_MEANING = {
    "set_gpu_allocator": allocators,
    "minkowski_algorithm=": algorithms,
    "convolution_mode=": convolution_modes,
    "num_threads=": threads,
    "mode= of 0.4's global pools and MinkowskiInstanceNorm": ways_to_average,
    "pooling_mode= of MinkowskiLocalPoolingTransposeFunction": transposed_pools,
    "is_sorted=": products,
    "coordinates= of global pools": coordinates,
    "tensor_stride= of unique_coordinate_map": labels_of_strides,
    "is_transpose= of KernelGenerator and 0.4's SparseTensor": directions,
    "D= of SELayer": dimensions,
    "force_creation=": creation,
    "out_coords_key= of get_row_indices_per_batch": origin_keys,
    "return_inverse= of 0.4's sparse_quantize with labels": inverses,
    "hash_type=": of_older_releases,
}
