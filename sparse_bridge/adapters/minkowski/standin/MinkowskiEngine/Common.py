"""What 0.4 kept in `MinkowskiEngine.Common`."""

from MinkowskiEngine.MinkowskiCommon import (
    MinkowskiModuleBase,
    convert_to_int_list,
    convert_to_int_tensor,
    get_postfix,
    prep_args,
)
from MinkowskiEngine.MinkowskiKernelGenerator import (
    KernelGenerator,
    KernelRegion,
    convert_region_type,
    get_kernel_volume,
)
from MinkowskiEngineBackend._C import GlobalPoolingMode, OperationType, RegionType

from sparse_bridge.adapters.minkowski import profile

__all__ = [
    "GlobalPoolingMode", "KernelGenerator", "KernelRegion", "MinkowskiModuleBase", "OperationType",
    "RegionType", "convert_region_type", "convert_to_int_list", "convert_to_int_tensor",
    "get_kernel_volume", "get_postfix", "prep_args", "save_ctx",
]  # fmt: skip

profile.saw_old("import MinkowskiEngine.Common")


def save_ctx(
    ctx, tensor_stride, stride, kernel_size, dilation, region_type, in_coords_key, out_coords_key,
    coords_man,
):  # fmt: skip
    """Keep what a backward pass of a custom autograd function needs."""
    ctx.tensor_stride, ctx.stride, ctx.kernel_size = tensor_stride, stride, kernel_size
    ctx.dilation, ctx.region_type = dilation, region_type
    ctx.in_coords_key, ctx.out_coords_key, ctx.coords_man = (
        in_coords_key,
        out_coords_key,
        coords_man,
    )
    return ctx
