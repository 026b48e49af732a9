"""Names, import paths and signatures of the stand-in."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest
import torch

from . import apis

LAYERS = [
    f"{kind}{n}d"
    for kind in ("SparseConv", "SubMConv", "SparseInverseConv", "SparseConvTranspose")
    for n in (1, 2, 3, 4)
]
POOLS = [*(f"SparseMaxPool{n}d" for n in (1, 2, 3, 4)), *(f"SparseAvgPool{n}d" for n in (1, 2, 3))]

NAMES = {
    "spconv": "__version__ SPCONV_VERSION_NUMBERS ConvAlgo AlgoHint constants core build utils"
    " tools cppconstants debug_utils core_cc",
    "spconv.constants": "PACKAGE_NAME PACKAGE_ROOT EDITABLE_INSTALLED DISABLE_JIT NDIM_DONT_CARE"
    " FILTER_HWIO SAVED_WEIGHT_LAYOUT ALL_WEIGHT_IS_KRSC SPCONV_DEBUG_SAVE_PATH BOOST_ROOT"
    " SPCONV_BWD_SPLITK SPCONV_NVRTC_MODE SPCONV_DEBUG_NVRTC_KERNELS SPCONV_DEBUG_CPP_ONLY"
    " AllocKeys SPCONV_DEBUG_WEIGHT SPCONV_CPP_INDICE_PAIRS SPCONV_USE_DIRECT_TABLE"
    " SPCONV_CPP_INDICE_PAIRS_IGEMM SPCONV_CPP_GEMM SPCONV_FX_TRACE_MODE"
    " SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE SPCONV_ALLOW_TF32 SPCONV_INT8_DEBUG SPCONV_DO_SORT",
    "spconv.pytorch": " ".join(LAYERS + POOLS) + " SparseConvTensor SparseGlobalMaxPool"
    " SparseGlobalAvgPool SparseModule SparseSequential SparseBatchNorm SparseReLU SparseIdentity"
    " assign_name_for_sparse_modules Identity AddTable ConcatTable JoinTable ToDense RemoveGrid"
    " ConvAlgo functional ops conv core modules pool tables identity hash constants cppcore np"
    " torch platform Path Union",
    "spconv.pytorch.conv": " ".join(LAYERS) + " SparseConvolutionBase SparseConvolution"
    " DEFAULT_SPARSE_CONV_TYPES FILTER_HWIO SparseConvTensor",
    "spconv.pytorch.core": "SparseConvTensor IndiceData ImplicitGemmIndiceData ThrustSortAllocator"
    " scatter_nd expand_nd SpConvTensorMeta",
    "spconv.pytorch.modules": "is_spconv_module is_sparse_conv SparseModule SparseSequential"
    " assign_name_for_sparse_modules SparseBatchNorm SparseSyncBatchNorm SparseReLU SparseIdentity"
    " PrintTensorMeta PrintCurrentTime",
    "spconv.pytorch.tables": "JoinTable AddTable AddTableMisaligned ConcatTable",
    "spconv.pytorch.identity": "Identity",
    "spconv.pytorch.spatial": "RemoveDuplicate",
    "spconv.pytorch.functional": "indice_conv indice_subm_conv indice_inverse_conv implicit_gemm"
    " indice_maxpool indice_maxpool_implicit_gemm indice_avgpool_implicit_gemm SparseConvFunction"
    " SparseInverseConvFunction SubMConvFunction SparseImplicitGemmFunction SparseMaxPoolFunction"
    " SparseMaxPoolImplicitGemmFunction SparseAvgPoolImplicitGemmFunction sparse_add"
    " sparse_add_hash_based",
    "spconv.pytorch.ops": "get_conv_output_size get_deconv_output_size get_indice_pairs"
    " get_indice_pairs_implicit_gemm indice_conv indice_conv_backward implicit_gemm"
    " implicit_gemm_backward indice_maxpool indice_maxpool_backward indice_maxpool_implicit_gemm"
    " indice_maxpool_implicit_gemm_backward indice_avgpool_implicit_gemm"
    " indice_avgpool_implicit_gemm_backward maximum_value_int_ global_pool_rearrange"
    " fused_indice_conv nms ConvAlgo DEBUG_INT64_HASH_K INT32_MAX",
    "spconv.pytorch.pool": " ".join(POOLS) + " SparseMaxPool SparseAvgPool SparseGlobalMaxOrAvgPool"
    " SparseGlobalMaxPool SparseGlobalAvgPool ALL_POOL_LAYERS",
    "spconv.pytorch.utils": "PointToVoxel gather_features_by_pc_voxel_id",
    "spconv.pytorch.hash": "HashTable",
    "spconv.pytorch.cppcore": "torch_tensor_to_tv torch_tensors_to_tv get_current_stream get_arch"
    " TorchAllocator TorchSpconvMatmul _TORCH_DTYPE_TO_TV _TV_DTYPE_TO_TORCH"
    " _TV_DTYPE_TO_TORCHQ _TORCH_UINT_WORKAROUNDS _ALL_INTS _TH_QTYPES",
    "spconv.pytorch.constants": "PYTORCH_VERSION TORCH_HAS_AMP is_amp_enabled",
    "spconv.core": "ConvAlgo AlgoHint",
    "spconv.algo": "GEMM CONV GEMM_CPP CONV_CPP",
    "spconv.cppconstants": "CPU_ONLY_BUILD BUILD_CUMM_VERSION BUILD_PCCM_VERSION HAS_BOOST"
    " COMPILED_CUDA_ARCHS COMPILED_CUDA_GEMM_ARCHS",
    "spconv.tools": "CUDAKernelTimer",
    "spconv.test_utils": "TestCase params_grid generate_sparse_data",
    "spconv.debug_utils": "spconv_save_debug_data",
    "spconv.benchmark": "",
    "spconv.gencode": "",
    "spconv.utils": "Point2VoxelCPU1d Point2VoxelCPU2d Point2VoxelCPU3d Point2VoxelCPU4d"
    " Point2VoxelGPU1d Point2VoxelGPU2d Point2VoxelGPU3d Point2VoxelGPU4d nullcontext tv rbbox_iou"
    " rbbox_intersection rbbox_iou_loss non_max_suppression_cpu rotate_non_max_suppression_cpu",
    "spconv.pytorch.quantization": "get_spconv_backend_config get_spconv_prepare_custom_config"
    " get_spconv_convert_custom_config prepare_spconv_torch_inference"
    " get_default_spconv_trt_ptq_qconfig get_default_spconv_trt_qat_qconfig"
    " get_default_spconv_qconfig_mapping get_spconv_fmod_to_qat_mapping"
    " get_spconv_qat_to_static_mapping quantize_per_tensor remove_conv_add_dq transform_qdq",
    "spconv.pytorch.quantization.intrinsic": "SpconvReLUNd SpconvBnNd SpconvBnReLUNd SpconvBnAddReLUNd SpconvAddReLUNd",
    "spconv.pytorch.quantization.intrinsic.qat": "SparseConv SparseConvReLU SparseConvAddReLU"
    " SparseConvBn SparseConvBnReLU SparseConvBnAddReLU",
    "spconv.pytorch.quantization.intrinsic.quantized": "SparseConvReLU SparseConvAddReLU LinearPerChannelWeightReLU",
    "spconv.pytorch.quantization.quantized": "SparseConv LinearPerChannelWeight",
    "spconv.pytorch.quantization.quantized.reference": "SpConv",
    "spconv.pytorch.quantization.core": "quantize_per_tensor quantized_add",
    "spconv.pytorch.quantization.fake_q": "SparseHistogramObserver SparseMinMaxObserver"
    " SparseMovingAvgObsFakeQuantize SparseFusedMovingAvgObsFakeQuantize"
    " default_symmetric_spconv_ptq_qconfig default_symmetric_spconv_qat_qconfig"
    " get_default_spconv_qconfig_mapping",
    "spconv.pytorch.quantization.backend_cfg": "get_spconv_backend_config"
    " non_weighted_op_qint8_dtype_config weighted_op_qint8_dtype_config",
    "spconv.pytorch.quantization.fuse_mapping": "fuse_conv_bn fuse_conv_bn_relu fuse_conv_bn_add_relu",
    "spconv.pytorch.quantization.graph": "remove_conv_add_dq transform_qdq",
    "spconv.pytorch.quantization.qmapping": "SPCONV_QAT_MODULE_MAPPINGS STATIC_SPCONV_QUANT_MODULE_MAPPINGS",
    "spconv.pytorch.quantization.modules": "ConvBatchNormAddAct",
    "spconv.pytorch.quantization.interpreter": "NetworkInterpreter register_node_handler"
    " register_method_handler get_node_handler",
    "spconv.pytorch.interpreter": "NetworkInterpreter REGISTERED_NODE_HANDLERS",
    "spconv.pytorch.quantization.intrinsic.modules": "SpconvReLUNd",
    "spconv.pytorch.quantization.intrinsic.qat.modules": "SparseConvBn",
    "spconv.pytorch.quantization.intrinsic.quantized.conv_relu": "SparseConvReLU",
    "spconv.pytorch.quantization.quantized.conv": "SparseConv",
    "spconv.pytorch.quantization.utils": "fuse_spconv_bn_weights fuse_spconv_bn_eval fuse_spconv_act_eval",
    "cumm": "__version__",
    "cumm.tensorview": "from_numpy Tensor zeros empty full gemm measure_and_print CUDAKernelTimer float32 int32",
    "cumm.tensorview.gemm": "Activation ConvAlgoDesp ConvIterAlgo ConvLayoutType ConvMode"
    " ConvOpType ConvParams GemmAlgoDesp GemmParams NVRTCParams ShuffleStrideType"
    " run_nvrtc_conv_kernel run_nvrtc_gemm_kernel",
    "cumm.tensorview.utils": "div_up align_up",
    "cumm.core_cc.tensorview_bind": "Activation ConvIterAlgo ConvLayoutType ConvMode ConvOpType ShuffleStrideType",
    "cumm.constants": "PACKAGE_NAME PACKAGE_ROOT CUMM_CPU_ONLY_BUILD CUMM_CUDA_VERSION"
    " CUMM_DISABLE_JIT CUMM_MAXIMUM_NVRTC_CONV_NDIM",
    "cumm.gemm.codeops": "div_up align_up",
    "cumm.gemm.constants": "NVRTCMode",
    "cumm.gemm.algospec.core": "GemmAlgo ShuffleStrideType",
    "cumm.conv.bases": "ConvOpType ConvIterAlgo ConvLayoutType ConvMode ConvLayout KRSC NHWC NCHW RSKC",
    "spconv.__version__": "__version__",
    "spconv.core_cc.csrc.sparse.all": "SpconvOps ThrustCustomAllocatorV2 ops3d ops_cpu3d",
    "spconv.core_cc.csrc.sparse.all.ops_cpu1d": "Point2VoxelCPU",
    "spconv.core_cc.csrc.sparse.all.ops4d": "Point2Voxel",
    "spconv.core_cc.csrc.sparse.alloc": "ExternalAllocator",
    "spconv.core_cc.csrc.sparse.inference": "InferenceOps",
    "spconv.core_cc.csrc.sparse.convops": "ConvTuneResult ExternalSpconvMatmul GemmTuneResult",
    "spconv.core_cc.csrc.sparse.convops.spops": "ConvGemmOps",
    "spconv.core_cc.csrc.sparse.convops.convops": "ConvTunerSimple",
    "spconv.core_cc.csrc.sparse.convops.gemmops": "GemmTunerSimple",
    "spconv.core_cc.csrc.utils.boxops": "BoxOps",
    "spconv.core_cc.csrc.utils.pcc": "PointCloudCompress",
    "spconv.core_cc.csrc.hash.core": "HashTable",
    "spconv.core_cc.cumm.common": "CompileInfo",
    "spconv.core_cc.cumm.conv.main": "ConvMainUnitTest",
    "spconv.core_cc.cumm.gemm.main": "GemmMainUnitTest",
}

CONV = "in_channels out_channels kernel_size stride=1 padding=0 dilation=1 groups=1 bias=True"
USUAL = "indice_key=None algo=None fp32_accum=None"
LAST = "large_kernel_fast_algo=False name=None"
SIGNATURES = {
    "SparseConv": f"{CONV} {USUAL} record_voxel_count=False {LAST}",
    "SparseConvTranspose": f"{CONV} {USUAL} record_voxel_count=False {LAST}",
    "SubMConv": f"{CONV} {USUAL} {LAST}",
    "SparseInverseConv": f"in_channels out_channels kernel_size indice_key bias=True algo=None fp32_accum=None {LAST}",
    "SparseMaxPool": "kernel_size stride=None padding=0 dilation=1 indice_key=None algo=None"
    " record_voxel_count=False name=None",
    "SparseAvgPool": "kernel_size stride=None padding=0 dilation=1 indice_key=None algo=None"
    " record_voxel_count=False name=None",
}


def parameters(function):
    """ "a b=1": positional names and defaults of a signature, without self."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        empty = default is inspect.Parameter.empty
        shown.append(parameter.name if empty else f"{parameter.name}={default}")
    return " ".join(shown)


@pytest.mark.parametrize("module", NAMES)
def test_every_name_at_its_path(standin, module):
    found = importlib.import_module(module)
    assert found.__spec__.name == module
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert missing == []


@pytest.mark.parametrize("name", LAYERS + POOLS)
def test_constructors(standin, name):
    cls = getattr(standin, name)
    assert parameters(cls) == SIGNATURES[name[:-2]]
    assert cls.__module__ in ("spconv.pytorch.conv", "spconv.pytorch.pool")
    assert issubclass(cls, standin.SparseModule)
    home = standin.conv.DEFAULT_SPARSE_CONV_TYPES | standin.pool.ALL_POOL_LAYERS
    assert cls in home


def test_other_signatures(standin):
    assert parameters(standin.conv.SparseConvolution) == (
        f"ndim in_channels out_channels kernel_size=3 {CONV.partition('kernel_size ')[2]}"
        " subm=False output_padding=0 transposed=False inverse=False indice_key=None algo=None"
        " fp32_accum=None record_voxel_count=False act_type=Activation.None_ act_alpha=0"
        " act_beta=0 large_kernel_fast_algo=False name=None device=None dtype=None"
    )
    assert parameters(standin.SparseConvTensor.__init__) == (
        "self features indices spatial_shape batch_size grid=None voxel_num=None indice_dict=None"
        " benchmark=False permanent_thrust_allocator=False enable_timer=False force_algo=None"
    )
    assert parameters(standin.SparseConvTensor.dense) == "self channels_first=True"
    assert parameters(standin.pool.SparseMaxPool) == (
        "ndim kernel_size=3 stride=1 padding=0 dilation=1 indice_key=None subm=False algo=None"
        " record_voxel_count=False name=None"
    )
    assert parameters(standin.ops.get_indice_pairs) == (
        "indices batch_size spatial_shape algo ksize stride padding dilation out_padding subm=False"
        " transpose=False num_out_act_bound=-1"
    )


def test_signatures_equal_the_wheels():
    wheel = apis.wheel()
    names = [*LAYERS, *POOLS, "SparseGlobalMaxPool", "SparseGlobalAvgPool", "SparseModule"]
    theirs = {name: parameters(getattr(wheel, name)) for name in names}
    functions = [name for name in NAMES["spconv.pytorch.ops"].split() if name.islower()]
    functions.remove("nms")  # of 1.x
    plain = {name: list(inspect.signature(getattr(wheel.ops, name)).parameters) for name in functions}
    with apis.standin() as standin:
        assert {name: parameters(getattr(standin, name)) for name in names} == theirs
        assert plain == {name: list(inspect.signature(getattr(standin.ops, name)).parameters) for name in functions}


@pytest.mark.slow
def test_modules_share_their_classes_as_upstream():
    code = """
import importlib, spconv, spconv.__version__, spconv.utils as utils
from cumm import tensorview as tv
from spconv.__version__ import __version__
all = importlib.import_module("spconv.core_cc.csrc.sparse.all")
print(spconv.__version__ is __version__, tv.utils.align_up(7, 4), tv.utils.div_up(7, 4))
print(utils.BoxOps is importlib.import_module("spconv.core_cc.csrc.utils.boxops").BoxOps)
for n in (1, 2, 3, 4):
    print(getattr(utils, f"Point2VoxelCPU{n}d") is getattr(all, f"ops_cpu{n}d").Point2VoxelCPU)
with tv.nullcontext(4) as four, utils.nullcontext() as none:
    print(four, none, tv.tensorview_bind.__name__)
"""
    ours = apis.python(f"import sparse_bridge; sparse_bridge.enable('spconv', mode='standin'){code}")
    apis.wheel()
    assert ours == apis.python(code) and "False" not in ours


def test_first_generation_names_are_the_same_objects(standin):
    import spconv

    assert spconv.SubMConv3d is standin.SubMConv3d
    assert spconv.SparseConvTensor is standin.SparseConvTensor
    from spconv.modules import SparseModule

    assert SparseModule is standin.SparseModule
    assert importlib.import_module("spconv.conv") is standin.conv is spconv.conv
    assert spconv.ops is standin.ops
    with pytest.raises(AttributeError, match="no attribute 'NoSuchLayer'"):
        _ = spconv.NoSuchLayer


def test_fourth_average_pool_is_absent_as_upstream(standin):
    assert not hasattr(standin, "SparseAvgPool4d")
    for name in ("SparseConvolution", "SparseSyncBatchNorm", "AddTableMisaligned", "PointToVoxel"):
        assert not hasattr(standin, name)


def homeless():
    """pickle looks through all modules for the one that a function without a home is in."""


homeless.__module__ = None


def test_compiled_parts_refuse_without_breaking_searches(standin):
    import spconv

    algo = importlib.import_module("spconv.algo")
    for look in (
        lambda: spconv.core_cc.csrc.sparse.all.SpconvOps.sort_1d_by_key,
        lambda: spconv.core_cc.csrc.utils.pcc.PointCloudCompress.encode_xyz,
        lambda: spconv.core_cc.csrc.hash.core.HashTable(True, 4, 4),
        lambda: algo.CONV_CPP.tune_and_cache,
        lambda: importlib.import_module("spconv.gencode").main,
    ):
        with pytest.raises(NotImplementedError, match="compiled code"):
            look()
    assert not hasattr(spconv.core_cc, "get_current_stream")
    assert pickle.loads(pickle.dumps(homeless)) is homeless
    with pytest.raises(NotImplementedError):
        standin.ops.fused_indice_conv(*[None] * 8)


def test_fx_traces_through_the_constructor(standin):
    layer = standin.SubMConv3d(4, 5, 3)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, features, indices):
            x = standin.SparseConvTensor(features, indices, [7, 8, 9], 2)
            return self.layer(x).features

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, standin.SparseModule)

    assert type(standin.SparseConvTensor) is standin.core.SpConvTensorMeta is not type
    net = Net()
    graph = torch.fx.GraphModule(net, Tracer().trace(net))
    x = apis.tensor(standin)
    torch.testing.assert_close(graph(x.features, x.indices), layer(x).features)


def test_nothing_is_imported_before_it_is_needed():
    out = apis.python(
        "import sys, sparse_bridge; sparse_bridge.enable('spconv', mode='standin');"
        "print('torch' in sys.modules, 'triton' in sys.modules, 'spconv' in sys.modules);"
        "import spconv; print('spconv.pytorch' in sys.modules)"
    )
    assert out.split() == ["False", "False", "False", "False"]
