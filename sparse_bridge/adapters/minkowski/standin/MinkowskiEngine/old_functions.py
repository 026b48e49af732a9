"""Autograd functions of 0.4, and the arguments that it gave to those that 0.5 kept.

0.4 passed a kernel as tensor stride, stride, kernel size, dilation, region type and region offsets;
offsets of a CUSTOM region were absolute.
"""

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from MinkowskiEngine.MinkowskiPooling import (
    MinkowskiGlobalPoolingFunction,
    MinkowskiLocalPoolingFunction,
    MinkowskiLocalPoolingTransposeFunction,
)
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import PoolingMode, RegionType

from sparse_bridge.errors import ContractError

__all__ = [
    "MinkowskiAvgPoolingFunction",
    "MinkowskiGlobalMaxPoolingFunction",
    "MinkowskiMaxPoolingFunction",
    "MinkowskiPoolingTransposeFunction",
]


def old_generator(tensor_stride, stride, kernel_size, dilation, region_type, region_offset, in_key, finer=False):
    """The KernelGenerator of 0.4's arguments.  finer: offsets count on the output's tensor stride.

    Raises: ContractError (offsets between the coordinates of the tensor stride).
    """
    dimension = in_key.get_coordinate_size() - 1
    region_type = RegionType(int(region_type))
    if region_type not in (RegionType.CUSTOM, RegionType.HYBRID):
        return KernelGenerator(kernel_size, stride, dilation, region_type=region_type, dimension=dimension)
    scale = torch.tensor(convert_to_int_list(tensor_stride, dimension))
    if finer:
        scale = scale // torch.tensor(convert_to_int_list(stride, dimension))
    offsets = torch.as_tensor(region_offset).cpu().reshape(-1, dimension)
    if bool((offsets % scale).any()):
        raise ContractError(
            f"region_offset {offsets.tolist()} on tensor stride {scale.tolist()}; offsets are "
            "absolute and must be multiples of it."
        )
    return KernelGenerator(
        -1, stride, region_type=RegionType.CUSTOM, region_offsets=offsets // scale, dimension=dimension
    )


class _Pooling(ComposedFunction):
    _transposed = False

    @classmethod
    def pool(cls, mode, features, kernel, in_key, out_key, manager):
        function = MinkowskiLocalPoolingTransposeFunction if cls._transposed else MinkowskiLocalPoolingFunction
        generator = old_generator(*kernel, in_key, cls._transposed)
        return function.compute(features, mode, generator, in_key, out_key, manager)


class MinkowskiMaxPoolingFunction(_Pooling):
    """apply(features, tensor_stride, stride, kernel_size, dilation, region_type, region_offset,
    in_key, out_key, manager)."""

    @classmethod
    def compute(
        cls,
        input_features,
        tensor_stride=1,
        stride=1,
        kernel_size=-1,
        dilation=1,
        region_type=0,
        region_offset=None,
        in_coords_key=None,
        out_coords_key=None,
        coords_manager=None,
    ):
        kernel = (tensor_stride, stride, kernel_size, dilation, region_type, region_offset)
        mode = PoolingMode.LOCAL_MAX_POOLING
        return cls.pool(mode, input_features, kernel, in_coords_key, out_coords_key, coords_manager)


class MinkowskiAvgPoolingFunction(_Pooling):
    """apply(features, tensor_stride, stride, kernel_size, dilation, region_type, region_offset,
    average, in_key, out_key, manager); sums without `average`."""

    @classmethod
    def compute(
        cls,
        input_features,
        tensor_stride=1,
        stride=1,
        kernel_size=-1,
        dilation=1,
        region_type=0,
        region_offset=None,
        average=True,
        in_coords_key=None,
        out_coords_key=None,
        coords_manager=None,
    ):
        kernel = (tensor_stride, stride, kernel_size, dilation, region_type, region_offset)
        mode = PoolingMode.LOCAL_AVG_POOLING if average else PoolingMode.LOCAL_SUM_POOLING
        return cls.pool(mode, input_features, kernel, in_coords_key, out_coords_key, coords_manager)


class MinkowskiPoolingTransposeFunction(MinkowskiAvgPoolingFunction):
    """The arguments of `MinkowskiAvgPoolingFunction`; always sums, as the layer."""

    _transposed = True


class MinkowskiGlobalMaxPoolingFunction(ComposedFunction):
    """apply(features, in_key, out_key, manager)."""

    @staticmethod
    def compute(input_features, in_coords_key=None, out_coords_key=None, coords_manager=None):
        return MinkowskiGlobalPoolingFunction.compute(
            input_features, PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX, in_coords_key, out_coords_key, coords_manager
        )
