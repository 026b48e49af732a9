"""What 0.4 kept in `MinkowskiEngine.Common`."""

from MinkowskiEngine.MinkowskiCommon import (
    MinkowskiModuleBase,
    convert_to_int_list,
    convert_to_int_tensor,
    get_minkowski_function,
    get_postfix,
    prep_args,
)
from MinkowskiEngine.MinkowskiCoords import save_ctx
from MinkowskiEngine.MinkowskiKernelGenerator import (
    KernelGenerator,
    KernelRegion,
    convert_region_type,
    get_kernel_volume,
)
from MinkowskiEngineBackend._C import GlobalPoolingMode, OperationType, RegionType

from sparse_bridge.adapters.minkowski import profile

__all__ = [
    "GlobalPoolingMode",
    "KernelGenerator",
    "KernelRegion",
    "MinkowskiModuleBase",
    "OperationType",
    "RegionType",
    "convert_region_type",
    "convert_to_int_list",
    "convert_to_int_tensor",
    "get_kernel_volume",
    "get_minkowski_function",
    "get_postfix",
    "prep_args",
    "save_ctx",
]

profile.saw_old("import MinkowskiEngine.Common")
