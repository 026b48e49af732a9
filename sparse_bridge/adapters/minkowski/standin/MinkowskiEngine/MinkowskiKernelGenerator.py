"""Kernel regions: which offsets a kernel has and in which order."""

from collections import namedtuple

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngineBackend._C import RegionType

from sparse_bridge.adapters.minkowski.errors import DimensionError
from sparse_bridge.adapters.minkowski.geometry import (
    custom_points,
    kernel_region,
    kernel_spec,
)
from sparse_bridge.errors import ContractError, UnsupportedError

__all__ = [
    "KernelGenerator", "KernelRegion", "convert_region_type", "get_kernel_volume", "save_ctx",
]  # fmt: skip

KernelRegion = namedtuple(
    "KernelRegion",
    ("kernel_size", "kernel_stride", "kernel_dilation", "region_type", "offset", "D"),
)


def _refuse_axis_types(axis_types):
    if axis_types is not None:
        raise ContractError(
            f"axis_types={axis_types!r}: kernels that mix regions per axis are not defined in "
            "MinkowskiEngine 0.5; use RegionType.CUSTOM with region_offsets."
        )


def _custom(region_type, region_offsets, dimension):
    if region_type is not RegionType.CUSTOM:
        return None
    if region_offsets is None:
        raise ContractError("RegionType.CUSTOM needs region_offsets, integers [V, D].")
    return custom_points(region_offsets, dimension)


def get_kernel_volume(region_type, kernel_size, region_offset, axis_types, dimension):
    """Number of kernel offsets.

    Args: region_type; kernel_size: int or one per axis; region_offset: [V, D] for CUSTOM;
        axis_types: None; dimension: D.
    Raises: ContractError (an AssertionError).
    """
    _refuse_axis_types(axis_types)
    region_type = RegionType(region_type)
    size = tuple(convert_to_int_list(kernel_size, dimension))
    custom = _custom(region_type, region_offset, dimension)
    return len(kernel_region(region_type, size, (1,) * dimension, custom))


def convert_region_type(
    region_type, tensor_stride, kernel_size, up_stride, dilation, region_offset, axis_types,
    dimension, center=True,
):  # fmt: skip
    """(region type, IntTensor [V, D] of absolute offsets, V) of a kernel on a tensor stride."""
    _refuse_axis_types(axis_types)
    region_type = RegionType(region_type)
    size = tuple(convert_to_int_list(kernel_size, dimension))
    steps = tuple(convert_to_int_list(dilation, dimension))
    custom = _custom(region_type, region_offset, dimension)
    region = kernel_region(region_type, size, steps, custom)
    stride = torch.tensor(convert_to_int_list(tensor_stride, dimension), dtype=torch.int32)
    up = torch.tensor(convert_to_int_list(up_stride, dimension), dtype=torch.int32)
    offsets = torch.tensor(region.points, dtype=torch.int32)
    return region_type, offsets * torch.div(stride, up, rounding_mode="floor"), len(region)


def save_ctx(ctx, kernel_generator, in_coords_key, out_coords_key, coordinate_manager):
    """Keep what a backward pass of a custom autograd function needs."""
    ctx.kernel_generator = kernel_generator
    ctx.in_coordinate_map_key = in_coords_key
    ctx.out_coordinate_map_key = out_coords_key
    ctx.coordinate_manager = coordinate_manager
    return ctx


class KernelGenerator:
    """The kernel of a layer: size, stride, dilation and region.

    Args:
        kernel_size, stride, dilation: int or one per axis.
        region_type: RegionType or its number.
        region_offsets: [V, D] integers, counted in tensor strides; for RegionType.CUSTOM.
        expand_coordinates: make new output coordinates.
        axis_types: None.
        dimension: D, required.

    Raises: ContractError (an AssertionError).
    """

    def __init__(
        self, kernel_size=-1, stride=1, dilation=1, is_transpose=False,
        region_type=RegionType.HYPER_CUBE, region_offsets=None, expand_coordinates=False,
        axis_types=None, dimension=-1,
    ):  # fmt: skip
        if dimension is None or dimension < 1:
            raise ContractError(f"dimension={dimension}; a kernel needs its number of axes.")
        _refuse_axis_types(axis_types)
        self._specs = {}
        region_type = RegionType(region_type)
        self._custom = _custom(region_type, region_offsets, dimension)
        if self._custom is not None and isinstance(kernel_size, int) and kernel_size < 0:
            # The box that holds the offsets: it decides nothing but the layer's repr.
            kernel_size = [1 + max(axis) - min(axis) for axis in zip(*self._custom, strict=True)]
        self.kernel_size = convert_to_int_list(kernel_size, dimension)
        self.kernel_stride = convert_to_int_list(stride, dimension)
        self.kernel_dilation = convert_to_int_list(dilation, dimension)
        for name in ("kernel_size", "kernel_stride", "kernel_dilation"):
            if min(getattr(self, name)) < 1:
                raise ContractError(
                    f"{name} is {getattr(self, name)}; every entry must be 1 or more."
                )
        if region_type is RegionType.HYPER_CROSS and max(self.kernel_size) == 1:
            region_type = RegionType.HYPER_CUBE
        if region_type is RegionType.HYBRID:
            raise UnsupportedError(
                "RegionType.HYBRID belongs to MinkowskiEngine 0.4; use RegionType.CUSTOM with "
                "region_offsets."
            )
        self.region_type = region_type
        self.region_offsets = region_offsets
        self.axis_types = axis_types
        self.dimension = dimension
        self.is_transpose = is_transpose
        self.expand_coordinates = expand_coordinates
        self.kernel_volume = len(self.region())

    @property
    def requires_strided_coordinates(self):
        return max(self.kernel_stride) > 1

    def region(self):
        return kernel_region(
            self.region_type, tuple(self.kernel_size), tuple(self.kernel_dilation), self._custom
        )

    def spec(self, transposed=False):
        """The kernel as the adapter's layers take it, of a forward or a transposed layer."""
        size, stride = tuple(self.kernel_size), tuple(self.kernel_stride)
        now = (
            transposed, size, stride, tuple(self.kernel_dilation), self.region_type,
            self.expand_coordinates,
        )  # fmt: skip
        found = self._specs.get(now)
        if found is None:
            expand = bool(self.expand_coordinates)
            found = kernel_spec(self.region(), size, stride, expand, transposed)
            self._specs[now] = found
        return found

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_specs"}

    def __setstate__(self, state):
        self.__dict__.update(state, _specs={})

    def summary(self):
        """The kernel as a layer's `repr` shows it."""
        text = f"kernel_size={self.kernel_size}, "
        if self.region_type is RegionType.CUSTOM:
            text = f"region_type={self.region_type}, kernel_volume={self.kernel_volume}, "
        return text + f"stride={self.kernel_stride}, dilation={self.kernel_dilation}"

    def get_kernel(self, tensor_stride, is_transpose):
        """(region type, absolute offsets, volume) on a tensor stride."""
        up = self.kernel_stride if is_transpose else [1] * self.dimension
        return convert_region_type(
            self.region_type, tensor_stride, self.kernel_size, up, self.kernel_dilation,
            self.region_offsets, self.axis_types, self.dimension,
        )  # fmt: skip

    def __repr__(self):
        text = f"(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
        text += f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type.name}, "
        return (
            self.__class__.__name__
            + text
            + f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )


def generator_of(given, kernel_size, stride, dilation, dimension, **options):
    """A layer's generator: the one it was given, or one of its sizes.

    Raises: DimensionError (a TypeError and AssertionError), ContractError (an AssertionError).
    """
    if dimension is None or dimension < 1:
        raise DimensionError(f"dimension={dimension}; expected 1 or more.")
    if given is not None:
        return given
    if isinstance(kernel_size, int) and kernel_size < 1:
        raise ContractError(f"kernel_size={kernel_size}; expected 1 or more.")
    return KernelGenerator(kernel_size, stride, dilation, dimension=dimension, **options)
