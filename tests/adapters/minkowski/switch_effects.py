"""Switches of MinkowskiEngine that have an effect, and those that are refused."""

from __future__ import annotations

import importlib

import pytest
import torch

from sparse_bridge.errors import ContractError, DeviceError
from tests.fake_gpu import fake_gpu

COORDS = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 3, 2], [1, 1, 1]]).int()
FEATS = torch.tensor([[1.0, -2.0], [3.0, 5.0], [7.0, 11.0], [-13.0, 17.0]])


def tensor(ME, **options):
    return ME.SparseTensor(FEATS, COORDS, **options)


def pooled(ME, layer):
    return layer(tensor(ME)).F


def backend():
    return importlib.import_module("MinkowskiEngineBackend._C")


def operation_mode(ME):
    modes = ME.SparseTensorOperationMode
    made = {}
    for mode in (modes.SHARE_COORDINATE_MANAGER, modes.SEPARATE_COORDINATE_MANAGER):
        ME.set_sparse_tensor_operation_mode(mode)
        assert ME.sparse_tensor_operation_mode() is mode
        made[mode] = tensor(ME).coordinate_manager is tensor(ME).coordinate_manager
    assert list(made.values()) == [True, False]
    with pytest.raises(ContractError):
        ME.set_sparse_tensor_operation_mode(1)


def global_manager(ME):
    ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER)
    manager = ME.CoordinateManager(D=2)
    ME.set_global_coordinate_manager(manager)
    assert tensor(ME).coordinate_manager is manager is ME.global_coordinate_manager()
    assert ME.set_global_coords_man is ME.set_global_coordinate_manager
    with pytest.raises(ContractError, match="CoordinateManager"):
        ME.set_global_coordinate_manager(manager._manager)


def cleared_manager(ME):
    ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER)
    before = tensor(ME).coordinate_manager
    ME.clear_global_coordinate_manager()
    assert ME.global_coordinate_manager() is None
    assert tensor(ME).coordinate_manager is not before
    assert ME.clear_global_coords_man is ME.clear_global_coordinate_manager


def map_type(ME, monkeypatch):
    with fake_gpu() as gpu:
        _map_type(ME, gpu, monkeypatch)


def _map_type(ME, gpu, monkeypatch):
    kinds = ME.CoordinateMapType
    module = importlib.import_module("MinkowskiEngine.MinkowskiCoordinateManager")
    monkeypatch.setattr(module, "_coordinate_map_type", None)
    free = ME.CoordinateManager(D=2)
    assert free.insert_and_map(COORDS)[0].is_key_set()
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    ME.CoordinateManager(D=2)._manager.use_device(cuda)
    for manager in (
        lambda: ME.CoordinateManager(D=2, coordinate_map_type=kinds.CPU),
        lambda: module.set_coordinate_map_type(kinds.CPU) or ME.CoordinateManager(D=2),
    ):
        made = manager()
        assert isinstance(made._manager, backend().CoordinateMapManagerCPU)
        with pytest.raises(DeviceError, match=r"CoordinateMapType\.CPU"):
            made._manager.use_device(cuda)
        made._manager.use_device(cpu)
    gpu.has(available=False)
    module.set_coordinate_map_type(kinds.CUDA)
    for options in ({}, {"coordinate_map_type": kinds.CUDA}):
        with pytest.raises(AssertionError, match="needs a GPU"):
            ME.CoordinateManager(D=2, **options)
    assert tensor(ME).coordinate_manager.coordinate_map_type is kinds.CPU  # as its coordinates
    gpu.has(available=True)
    made = ME.CoordinateManager(D=2)
    assert isinstance(made._manager, backend().CoordinateMapManagerGPU_c10)
    for call in (made.insert_and_map, lambda c: made.insert_field(c.float(), 1)):
        with pytest.raises(DeviceError, match=r"CoordinateMapType\.CUDA"):
            call(COORDS)
    for call in (
        lambda: module.set_coordinate_map_type("cpu"),
        lambda: ME.CoordinateManager(D=2, coordinate_map_type="cpu"),
    ):
        with pytest.raises(ContractError, match="CoordinateMapType"):
            call()


def quantisation(ME):
    modes = ME.SparseTensorQuantizationMode
    coords = torch.tensor([[0, 1], [0, 1], [0, 2]]).int()
    feats, found = torch.tensor([[1.0], [3.0], [9.0]]), {}
    for mode in modes:
        try:
            made = ME.SparseTensor(feats, coords, quantization_mode=mode)
            found[mode.name] = made.F.flatten().tolist()
        except ValueError:  # refuses points that share a voxel
            found[mode.name] = None
    assert found == {
        "RANDOM_SUBSAMPLE": [1, 9],
        "UNWEIGHTED_AVERAGE": [2, 9],
        "UNWEIGHTED_SUM": [4, 9],
        "MAX_POOL": [3, 9],
        "NO_QUANTIZATION": None,
        "SPLAT_LINEAR_INTERPOLATION": None,
    }
    with pytest.raises(ContractError, match="quantization_mode"):
        tensor(ME, quantization_mode=1)


def region(ME):
    volumes = {}
    for kind in ("HYPER_CUBE", "HYPER_CROSS", "CUSTOM", "HYBRID"):
        options = {
            "CUSTOM": {"region_offsets": [[0, 0], [5, 1]]},
            "HYBRID": {"axis_types": [ME.RegionType.HYPER_CUBE, ME.RegionType.HYPER_CROSS]},
        }.get(kind, {})
        kernel = ME.KernelGenerator([3, 5], region_type=ME.RegionType[kind], dimension=2, **options)
        volumes[kind] = kernel.kernel_volume
    assert volumes == {"HYPER_CUBE": 15, "HYPER_CROSS": 7, "CUSTOM": 2, "HYBRID": 7}
    with pytest.raises(ContractError, match="region_type is 9"):
        ME.KernelGenerator(3, region_type=9, dimension=2)


def pooling(ME):
    found = {}
    for mode in ME.PoolingMode:
        if mode.name.startswith("GLOBAL"):
            _, how, *_ = mode.name.split("_")
            out = pooled(ME, ME.MinkowskiGlobalPooling(mode=mode))[0].tolist()
            assert found.setdefault(how, out) == out
    found["AVG"] = [round(3 * part) for part in found["AVG"]]
    assert found == {"SUM": [11.0, 14.0], "AVG": [11, 14], "MAX": [7.0, 11.0]}
    base = importlib.import_module("MinkowskiEngine.MinkowskiPooling").MinkowskiPoolingBase
    local = [
        pooled(ME, base(2, 2, pooling_mode=ME.PoolingMode[f"LOCAL_{how}_POOLING"], dimension=2))
        for how in ("SUM", "AVG", "MAX")
    ]
    assert [part[0].tolist() for part in local] == [[4, 3], [2, 1.5], [3, 5]]
    function = ME.MinkowskiLocalPoolingFunction.apply
    for wrong in (
        lambda: base(2, 2, pooling_mode=3.5, dimension=2),
        lambda: function(FEATS, 77, None, None, None, tensor(ME).coordinate_manager),
        lambda: ME.MinkowskiGlobalPooling(mode=ME.PoolingMode.LOCAL_SUM_POOLING),
    ):
        with pytest.raises(ContractError, match=r"(?i)mode"):
            wrong()


def operation(ME):
    x = tensor(ME)
    glob = ME.MinkowskiGlobalSumPooling()(x)
    keys = x.coordinate_map_key, glob.coordinate_map_key, x.coordinate_manager
    base = importlib.import_module("MinkowskiEngine.MinkowskiBroadcast").MinkowskiBroadcastBase
    sums, products = x.F[0] + glob.F[0], x.F[0] * glob.F[0]
    for number, want in ((0, sums), (1, products)):
        for mode in (ME.BroadcastMode(number), ME.OperationType(number)):
            out = ME.MinkowskiBroadcastFunction.apply(x.F, glob.F, mode, *keys)
            assert torch.equal(out[0], want)
            assert torch.equal(base(mode)(x, glob).F[0], want)
    with pytest.raises(ContractError, match="operation_type"):
        base(2)


def forced_maps(ME):
    manager = tensor(ME).coords_man
    fine = manager.get_coords_key(1)
    known, made = manager.stride(fine, 2), manager.stride(fine, 2, True)
    assert manager.stride(fine, 2, False) == known != made
    up = [manager.transposed_stride(known, 2, 2, 1, force) for force in (False, True)]
    assert up[0] == fine != up[1]


def doubled(ME):
    sample = (COORDS[:, 1:], FEATS, torch.zeros(4))
    for is_double, dtype in ((False, torch.float32), (True, torch.float64)):
        collate = ME.utils.SparseCollation(is_double=is_double)
        assert collate([sample])[1].dtype == dtype
        collate = ME.utils.batch_sparse_collate
        assert collate([sample], is_double=is_double)[1].dtype == dtype


def lists_stay(ME, monkeypatch):
    manager, moved = tensor(ME).coords_man, []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self) or self)
    manager.get_kernel_map(1, 1, on_gpu=True)
    assert not moved
    manager.get_kernel_map(1, 1, on_gpu=False)
    assert len(moved) == 9


EFFECTS = {
    "set_sparse_tensor_operation_mode": operation_mode,
    "set_global_coordinate_manager": global_manager,
    "clear_global_coordinate_manager": cleared_manager,
    "set_coordinate_map_type": map_type,
    "quantization_mode=": quantisation,
    "region_type=": region,
    "mode= of global pools": pooling,
    "operation_type=": operation,
    "force_creation= of stride": forced_maps,
    "is_double=": doubled,
    "on_gpu=": lists_stay,
}


# refusals

REFUSALS = {
    "center= of convert_region_type": lambda ME, value: ME.convert_region_type(
        0, 1, 3, 1, 1, None, None, 2, center=value
    ),
    "slicing_mode=": lambda ME, value: tensor(ME).slice(tensor(ME), slicing_mode=value),
    "mode= of quantization_average_features": lambda ME, value: backend().quantization_average_features(
        FEATS, torch.arange(4), torch.arange(4), 4, value
    ),
}
