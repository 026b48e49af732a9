"""The package as code meets it: names, import spellings, life cycle, switches, helpers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters import base, import_hook
from sparse_bridge.errors import LifecycleError
from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULE_NAMES = """
    SparseTensor TensorField CoordinateManager CoordinateMapKey KernelGenerator KernelRegion
    CoordsManager MinkowskiModuleBase MinkowskiNetwork MinkowskiAlgorithm GPUMemoryAllocatorType
    CoordinateMapType RegionType PoolingMode BroadcastMode SparseTensorOperationMode
    SparseTensorQuantizationMode is_cuda_available cuda_version cudart_version get_gpu_memory_info
    print_diagnostics set_sparse_tensor_operation_mode sparse_tensor_operation_mode
    global_coordinate_manager set_global_coordinate_manager clear_global_coordinate_manager
    set_gpu_allocator set_memory_manager_backend get_kernel_volume convert_region_type
    convert_to_int_tensor cat sum mean var to_sparse to_sparse_all dense_coordinates spmm
    MinkowskiOps MinkowskiFunctional utils modules
    MinkowskiConvolution MinkowskiConvolutionTranspose MinkowskiGenerativeConvolutionTranspose
    MinkowskiChannelwiseConvolution MinkowskiSumPooling MinkowskiMaxPooling MinkowskiAvgPooling
    MinkowskiPoolingTranspose MinkowskiGlobalPooling MinkowskiGlobalSumPooling
    MinkowskiGlobalAvgPooling MinkowskiGlobalMaxPooling MinkowskiBroadcast
    MinkowskiBroadcastConcatenation MinkowskiBroadcastAddition MinkowskiBroadcastMultiplication
    MinkowskiPruning MinkowskiUnion MinkowskiInterpolation MinkowskiLinear MinkowskiBatchNorm
    MinkowskiSyncBatchNorm MinkowskiInstanceNorm MinkowskiStableInstanceNorm MinkowskiSinusoidal
    MinkowskiToSparseTensor MinkowskiToDenseTensor MinkowskiToFeature MinkowskiStackCat
    MinkowskiStackSum MinkowskiStackMean MinkowskiStackVar
    MinkowskiConvolutionFunction MinkowskiConvolutionTransposeFunction
    MinkowskiLocalPoolingFunction MinkowskiLocalPoolingTransposeFunction
    MinkowskiGlobalPoolingFunction MinkowskiBroadcastFunction MinkowskiInstanceNormFunction
    MinkowskiPruningFunction MinkowskiUnionFunction MinkowskiInterpolationFunction
    MinkowskiDirectMaxPoolingFunction MinkowskiSPMMFunction MinkowskiSPMMAverageFunction
    MinkowskiELU MinkowskiHardshrink MinkowskiHardsigmoid MinkowskiHardtanh MinkowskiHardswish
    MinkowskiLeakyReLU MinkowskiLogSigmoid MinkowskiPReLU MinkowskiReLU MinkowskiReLU6
    MinkowskiRReLU MinkowskiSELU MinkowskiCELU MinkowskiGELU MinkowskiSigmoid MinkowskiSiLU
    MinkowskiSoftplus MinkowskiSoftshrink MinkowskiSoftsign MinkowskiTanh MinkowskiTanhshrink
    MinkowskiThreshold MinkowskiSoftmin MinkowskiSoftmax MinkowskiLogSoftmax
    MinkowskiAdaptiveLogSoftmaxWithLoss MinkowskiDropout MinkowskiAlphaDropout
"""
SUBMODULES = """
    MinkowskiCommon MinkowskiKernelGenerator MinkowskiCoordinateManager MinkowskiTensor
    MinkowskiSparseTensor MinkowskiTensorField MinkowskiNonlinearity MinkowskiNormalization
    MinkowskiPooling MinkowskiOps MinkowskiFunctional
"""


def test_every_name_of_the_contract_is_there(ME):
    assert ME.__version__ == "0.5.4"
    assert [name for name in MODULE_NAMES.split() if not hasattr(ME, name)] == []
    for name in ("MinkowskiConvolution", "MinkowskiUnion", "MinkowskiNetwork", "MinkowskiPruning"):
        assert isinstance(getattr(ME, name), type)
    assert isinstance(ME.MinkowskiOps, types.ModuleType)
    assert not hasattr(ME, "ConvolutionMode")
    backend = importlib.import_module("MinkowskiEngineBackend._C")
    assert backend.ConvolutionMode.COPY_GEMM == 2 and backend.HYPER_CROSS is ME.RegionType(1)
    assert ME.PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX == 11


def test_both_import_spellings_give_one_module(ME):
    for name in SUBMODULES.split():
        dotted = importlib.import_module(f"MinkowskiEngine.{name}")
        assert importlib.import_module(name) is dotted
    assert importlib.import_module("MinkowskiSparseTensor").SparseTensor is ME.SparseTensor
    assert importlib.import_module("MinkowskiEngine.MinkowskiConvolution").MinkowskiConvolution is (
        ME.MinkowskiConvolution
    )
    assert importlib.import_module("utils.gradcheck") is importlib.import_module("MinkowskiEngine.utils.gradcheck")
    assert ME.SparseTensor.__module__ == "MinkowskiEngine.MinkowskiSparseTensor"
    assert importlib.util.find_spec("MinkowskiEngine") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("MinkowskiEngine.nothing")


def python(code, *path, **environment):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)]), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_common_flat_names_stay_those_of_others(tmp_path):
    (tmp_path / "utils.py").write_text("mine = True\n")
    code = """
import sys, sparse_bridge
handle = sparse_bridge.enable("minkowski")
try:
    import modules
except ModuleNotFoundError:
    print("not before")
import MinkowskiEngine as ME, utils, modules
print(utils.mine, modules is ME.modules, ME.utils.sparse_quantize.__name__)
import MinkowskiOps
handle.disable()
print([n for n in sys.modules if n.startswith("Minkowski") or n in ("modules", "diagnostics")])
print("utils" in sys.modules, sys.path == [p for p in sys.path if "standin" not in p])
sparse_bridge.enable("minkowski")
import MinkowskiEngine
print(MinkowskiEngine is ME)
"""
    assert python(code, tmp_path).splitlines() == ["not before", "True True sparse_quantize", "[]", "True True", "True"]


@pytest.mark.slow
def test_importing_costs_no_cuda_and_needs_no_triton():
    code = """
import sparse_bridge
sparse_bridge.enable("minkowski")
import MinkowskiEngine, sys
print("triton" in sys.modules, "spconv" in sys.modules, "torchsparse" in sys.modules)
"""
    assert python(code) == "False False False"


def test_a_real_framework_that_is_imported_already_is_refused(monkeypatch):
    sparse_bridge.disable("minkowski")
    real = types.ModuleType("MinkowskiEngine")
    real.__spec__ = importlib.util.spec_from_loader("MinkowskiEngine", loader=None)
    monkeypatch.setitem(sys.modules, "MinkowskiEngine", real)
    with pytest.raises(LifecycleError, match="before the first import"):
        sparse_bridge.enable("minkowski")
    assert sys.modules["MinkowskiEngine"] is real
    adapter = base.load("minkowski")
    with pytest.raises(LifecycleError):
        adapter.patches()
    assert import_hook.really_imported(adapter)


@pytest.mark.slow
def test_one_that_is_installed_steps_aside(tmp_path):
    package = tmp_path / "MinkowskiEngine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.5.4'\nreal = True\n")
    code = """
import sparse_bridge
with sparse_bridge.enable("minkowski") as handle:
    import MinkowskiEngine
    print(hasattr(MinkowskiEngine, "real"), handle.status()["minkowski"].mode)
del MinkowskiEngine
import MinkowskiEngine
print(MinkowskiEngine.real)
"""
    assert python(code, tmp_path).splitlines() == ["False standin", "True"]


def test_report_counts_layers(ME):
    x = ME.SparseTensor(torch.ones(1, 2), torch.zeros(1, 3, dtype=torch.int32))
    with sparse_bridge.enable("minkowski") as handle:
        net = torch.nn.Sequential(
            ME.MinkowskiConvolution(2, 3, kernel_size=3, dimension=2),
            ME.MinkowskiBatchNorm(3),
            ME.MinkowskiReLU(),
            ME.MinkowskiConvolution(3, 3, kernel_size=1, dimension=2),
        ).eval()
        net(x)
        layers = handle.report().layers["minkowski"]
    assert layers["MinkowskiConvolution"].bridged == 2 and not layers["MinkowskiReLU"].original


def test_switches_and_diagnostics(ME, capsys):
    assert ME.is_cuda_available() == torch.cuda.is_available()
    assert isinstance(ME.cuda_version(), int) and len(ME.get_gpu_memory_info()) == 2
    ME.print_diagnostics()
    assert "0.5.4" in capsys.readouterr().out
    ME.set_gpu_allocator(ME.GPUMemoryAllocatorType.CUDA)
    with pytest.warns(DeprecationWarning, match="set_gpu_allocator"):
        ME.set_memory_manager_backend(ME.GPUMemoryAllocatorType.PYTORCH)
    manager = ME.CoordinateManager(D=3, num_threads=3)
    assert manager.num_threads == 3 and manager.D == 3
    for algorithm in ME.MinkowskiAlgorithm:
        made = ME.CoordinateManager(D=1, minkowski_algorithm=algorithm)
        assert made.minkowski_algorithm is algorithm
    region, offsets, volume = ME.convert_region_type(ME.RegionType.HYPER_CROSS, [2, 2], 3, 1, 1, None, None, 2)
    assert volume == 5 and offsets[1].tolist() == [2, 0] and region == 1
    assert ME.convert_to_int_tensor(3, 2).tolist() == [3, 3]


def test_summary(ME, capsys):
    net = torch.nn.Sequential(ME.MinkowskiConvolution(2, 3, kernel_size=3, dimension=2), ME.MinkowskiReLU())
    net[0].kernel.requires_grad_(False)
    x = ME.SparseTensor(torch.ones(1, 2), torch.zeros(1, 3, dtype=torch.int32))
    assert ME.utils.summary(net, x) == (9 * 6, 0)
    assert "MinkowskiConvolution" in capsys.readouterr().out


def test_initialisation(ME):
    torch.manual_seed(0)
    kernel = ME.MinkowskiConvolution(16, 32, kernel_size=3, dimension=3).kernel
    bound = 1 / np.sqrt(16 * 27)
    assert 0.9 * bound < kernel.abs().max() <= bound
    up = ME.MinkowskiConvolutionTranspose(16, 32, kernel_size=2, stride=2, dimension=3).kernel
    assert 0.9 / np.sqrt(32 * 8) < up.abs().max() <= 1 / np.sqrt(32 * 8)
    ME.utils.kaiming_normal_(kernel, mode="fan_out", nonlinearity="relu")
    assert float(kernel.detach().std()) == pytest.approx(np.sqrt(2 / (32 * 27)), rel=0.05)
    flat = torch.empty(64, 16)
    ME.utils.kaiming_normal_(flat, mode="fan_in", nonlinearity="relu")
    assert float(flat.std()) == pytest.approx(np.sqrt(2 / 16), rel=0.1)


def test_repr(ME):
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2)
    assert repr(conv) == ("MinkowskiConvolution(in=3, out=4, kernel_size=[3, 3], stride=[1, 1], dilation=[1, 1])")
    assert repr(ME.MinkowskiReLU(inplace=True)) == "MinkowskiReLU()"
    generator = ME.KernelGenerator(region_type=ME.RegionType.CUSTOM, region_offsets=[[0, 0], [3, 1]], dimension=2)
    assert "kernel_volume=2" in repr(ME.MinkowskiConvolution(1, 1, kernel_generator=generator, dimension=2))


def test_sync_batch_norm_conversion(ME):
    net = torch.nn.Sequential(
        ME.MinkowskiBatchNorm(3, eps=1e-3, momentum=0.2), torch.nn.Sequential(ME.MinkowskiBatchNorm(4, affine=False))
    )
    converted = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    bn = converted[0].bn
    assert isinstance(converted[0], ME.MinkowskiSyncBatchNorm)
    assert isinstance(bn, torch.nn.SyncBatchNorm) and (bn.eps, bn.momentum) == (1e-3, 0.2)
    assert isinstance(converted[1][0], ME.MinkowskiSyncBatchNorm)
    alone = ME.MinkowskiBatchNorm(3)
    weight = alone.bn.weight
    assert ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(alone).bn.weight is weight


def test_nonlinearities_and_functions(ME):
    x = ME.SparseTensor(torch.randn(6, 4), torch.arange(12).reshape(6, 2).int())
    for name in ME.MinkowskiNonlinearity.__all__:
        if name in ("MinkowskiNonlinearityBase", "MinkowskiAdaptiveLogSoftmaxWithLoss"):
            continue
        arguments = {"MinkowskiThreshold": (0.1, 2.0), "MinkowskiSinusoidal": (4, 3)}.get(name, ())
        if name in ("MinkowskiSoftmin", "MinkowskiSoftmax", "MinkowskiLogSoftmax"):
            arguments = (1,)
        layer = getattr(ME, name)(*arguments).eval()
        y = layer(x)
        assert y.coordinate_map_key == x.coordinate_map_key and type(y) is ME.SparseTensor
        if name != "MinkowskiSinusoidal":
            torch.testing.assert_close(y.F, layer.module(x.F))
    MF = importlib.import_module("MinkowskiEngine.MinkowskiFunctional")
    for name in MF.__all__:
        assert callable(getattr(MF, name))
    torch.testing.assert_close(MF.leaky_relu(x, 0.3).F, torch.nn.functional.leaky_relu(x.F, 0.3))
    torch.testing.assert_close(MF.tanh(x).F, x.F.tanh())
    target = torch.randint(0, 4, (6,))
    torch.testing.assert_close(MF.cross_entropy(x, target), torch.nn.functional.cross_entropy(x.F, target))
    torch.manual_seed(0)
    assert (MF.dropout(x).F == 0).any()

    class Cube(ME.MinkowskiNonlinearity.MinkowskiNonlinearityBase):
        MODULE = torch.nn.ELU

    assert torch.equal(Cube()(x).F, torch.nn.functional.elu(x.F))


def test_autograd_functions_fill_in_keys(ME):
    coords = torch.tensor([[0, 0], [0, 1], [1, 4]], dtype=torch.int32)
    x = ME.SparseTensor(torch.randn(3, 2), coords)
    manager, key = x.coordinate_manager, x.coordinate_map_key
    generator = ME.KernelGenerator(2, 2, dimension=1)
    out_key = ME.CoordinateMapKey(2)
    kernel = torch.randn(2, 2, 3)
    y = ME.MinkowskiConvolutionFunction().apply(x.F, kernel, generator, None, key, out_key, manager)
    assert out_key.get_key() == ([2], "") and y.shape == (2, 3)
    back = ME.MinkowskiConvolutionTransposeFunction.apply(
        y, kernel.transpose(1, 2), generator, None, out_key, key, manager
    )
    assert back.shape == (3, 2)
    pool_key = ME.CoordinateMapKey(2)
    mode = ME.PoolingMode.LOCAL_SUM_POOLING
    p = ME.MinkowskiLocalPoolingFunction.apply(x.F, mode, generator, key, pool_key, manager)
    assert pool_key == out_key and p.shape == (2, 2)
    up = ME.MinkowskiLocalPoolingTransposeFunction.apply(p, mode, generator, pool_key, key, manager)
    torch.testing.assert_close(up, p[[0, 0, 1]])
    glob_key = ME.CoordinateMapKey(2)
    g = ME.MinkowskiGlobalPoolingFunction.apply(x.F, ME.PoolingMode.GLOBAL_SUM_POOLING_KERNEL, key, glob_key, manager)
    assert glob_key == manager.origin() and g.shape == (2, 2)
    b = ME.MinkowskiBroadcastFunction.apply(x.F, g, ME.BroadcastMode.ELEMENTWISE_ADDITON, key, glob_key, manager)
    torch.testing.assert_close(b, x.F + g[[0, 0, 1]])
    pruned, union = ME.CoordinateMapKey(2), ME.CoordinateMapKey(2)
    q = ME.MinkowskiPruningFunction.apply(x.F, torch.tensor([True, False, True]), key, pruned, manager)
    u = ME.MinkowskiUnionFunction.apply([key, pruned], union, manager, x.F, q)
    assert torch.equal(u, x.F + torch.stack([q[0], torch.zeros(2), q[1]]))
    n = ME.MinkowskiInstanceNormFunction.apply(x.F, key, None, manager)
    assert n.shape == (3, 2) and not n[2].any()
