"""MinkowskiEngine, answered by sparse_bridge: the same names and rules on every GPU and the CPU."""

from importlib import import_module as _import_module
from os.path import dirname as _dirname

from sparse_bridge.adapters.minkowski import profile as _profile

file_dir = _dirname(__file__)
_LAYERS = (
    "MinkowskiBroadcast",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiConvolution",
    "MinkowskiInterpolation",
    "MinkowskiNetwork",
    "MinkowskiNonlinearity",
    "MinkowskiNormalization",
    "MinkowskiPooling",
    "MinkowskiPruning",
    "MinkowskiUnion",
    "sparse_matrix_functions",
)
_NAMES = {
    "MinkowskiEngineBackend._C": (
        "BroadcastMode",
        "CoordinateMapKey",
        "CoordinateMapType",
        "GPUMemoryAllocatorType",
        "GlobalPoolingMode",
        "MinkowskiAlgorithm",
        "OperationType",
        "PoolingMode",
        "RegionType",
        "cuda_version",
        "cudart_version",
        "get_gpu_memory_info",
        "is_cuda_available",
    ),
    "MinkowskiEngine.MinkowskiCommon": ("MinkowskiModuleBase", "convert_to_int_list", "convert_to_int_tensor"),
    "MinkowskiEngine.MinkowskiCoordinateManager": (
        "CoordinateManager",
        "set_gpu_allocator",
        "set_memory_manager_backend",
    ),
    "MinkowskiEngine.MinkowskiKernelGenerator": (
        "KernelGenerator",
        "KernelRegion",
        "convert_region_type",
        "get_kernel_volume",
    ),
    "MinkowskiEngine.MinkowskiTensor": (
        "SparseTensorOperationMode",
        "SparseTensorQuantizationMode",
        "clear_global_coordinate_manager",
        "global_coordinate_manager",
        "set_global_coordinate_manager",
        "set_sparse_tensor_operation_mode",
        "sparse_tensor_operation_mode",
    ),
    "MinkowskiEngine.MinkowskiSparseTensor": ("SparseTensor",),
    "MinkowskiEngine.MinkowskiTensorField": ("TensorField",),
    "MinkowskiEngine.MinkowskiOps": (
        "MinkowskiLinear",
        "MinkowskiStackCat",
        "MinkowskiStackMean",
        "MinkowskiStackSum",
        "MinkowskiStackVar",
        "MinkowskiToDenseTensor",
        "MinkowskiToFeature",
        "MinkowskiToSparseTensor",
        "cat",
        "dense_coordinates",
        "mean",
        "to_sparse",
        "to_sparse_all",
        "var",
    ),
    "MinkowskiEngine.MinkowskiFunctional": (),
    # names of 0.4
    "MinkowskiEngine.MinkowskiCoords": ("CoordsKey", "CoordsManager", "MemoryManagerBackend"),
    "MinkowskiEngine.old_functions": (
        "MinkowskiAvgPoolingFunction",
        "MinkowskiGlobalMaxPoolingFunction",
        "MinkowskiMaxPoolingFunction",
        "MinkowskiPoolingTransposeFunction",
    ),
    "MinkowskiEngine.diagnostics": ("print_diagnostics",),
}
# Names that modules share, of modules that import them.
_ALSO = {
    "MinkowskiCoordinateManager": ("CoordsManager",),
    "MinkowskiPooling": (
        "MinkowskiAvgPoolingFunction",
        "MinkowskiGlobalMaxPoolingFunction",
        "MinkowskiMaxPoolingFunction",
        "MinkowskiPoolingTransposeFunction",
    ),
}


def _fill():
    """Import every submodule now: some share their name with a class, and the class must stay."""
    namespace = {}
    for name in _LAYERS:
        module = _import_module(f"MinkowskiEngine.{name}")
        namespace.update({public: getattr(module, public) for public in module.__all__})
    for name, publics in _NAMES.items():
        module = _import_module(name)
        namespace.update({public: getattr(module, public) for public in publics})
    for name, publics in _ALSO.items():
        vars(_import_module(f"MinkowskiEngine.{name}")).update({p: namespace[p] for p in publics})
    namespace["sum"] = _import_module("MinkowskiEngine.MinkowskiOps")._sum
    del namespace["ComposedFunction"]
    _import_module("MinkowskiEngine.SparseTensor")  # 0.4's module; the name is the class's
    for verb in ("clear_global", "global", "set_global"):
        namespace[f"{verb}_coords_man"] = namespace[f"{verb}_coordinate_manager"]
    return namespace


globals().update(_fill())
# These are written with the names above.
_import_module("MinkowskiEngine.modules")
_import_module("MinkowskiEngine.utils")


def __getattr__(name):
    if name == "__version__":
        return _profile.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
