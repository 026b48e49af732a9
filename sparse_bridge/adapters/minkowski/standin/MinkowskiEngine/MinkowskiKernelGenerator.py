"""Kernel regions: which offsets a kernel has and in which order."""

from collections import namedtuple

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase, convert_to_int_list
from MinkowskiEngineBackend._C import RegionType

from sparse_bridge.adapters.minkowski.errors import DimensionError, GeneratorTypeError
from sparse_bridge.adapters.minkowski.geometry import (
    custom_points,
    hybrid_points,
    is_count,
    kernel_region,
    kernel_spec,
    region_of_axes,
)
from sparse_bridge.adapters.minkowski.strides import LARGEST_STRIDE
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import member
from sparse_bridge.errors import ContractError, OverflowLimitError, UnsupportedError

__all__ = ["KernelGenerator", "KernelRegion", "convert_region_type", "get_kernel_volume", "save_ctx"]

KernelRegion = namedtuple(
    "KernelRegion", ("kernel_size", "kernel_stride", "kernel_dilation", "region_type", "offset", "dimension")
)


def _resolved(region_type, region_offsets, axis_types, kernel_size, dimension):
    """(region type, the points of a CUSTOM or HYBRID region or None for a cube or a cross)."""
    region_type = member("region_type", region_type, RegionType)
    region_type = region_of_axes(region_type, axis_types, dimension)
    if region_type is RegionType.HYBRID:
        types = tuple(RegionType(axis_type) for axis_type in axis_types)
        return region_type, hybrid_points(tuple(kernel_size), types)
    if region_type is not RegionType.CUSTOM:
        return region_type, None
    if region_offsets is None:
        raise ContractError("RegionType.CUSTOM needs region_offsets, integers [V, D].")
    return region_type, custom_points(region_offsets, dimension)


def get_kernel_volume(region_type, kernel_size, region_offset, axis_types, dimension):
    """Number of kernel offsets.

    Args: region_type; kernel_size: int or one per axis; region_offset: [V, D] for CUSTOM;
        axis_types: the region of each axis, for HYBRID; dimension: D.
    Raises: ContractError (an AssertionError).
    """
    size = tuple(convert_to_int_list(kernel_size, dimension))
    region_type, listed = _resolved(region_type, region_offset, axis_types, size, dimension)
    return len(kernel_region(region_type, size, (1,) * dimension, listed))


def convert_region_type(
    region_type, tensor_stride, kernel_size, up_stride, dilation, region_offset, axis_types, dimension, center=True
):
    """(region type, IntTensor [V, D] of absolute offsets, V) of a kernel on a tensor stride.

    Raises: ContractError, OverflowLimitError (offsets beyond 32 bits), UnsupportedError (`center=False`: odd sizes
        are centred everywhere).
    """
    if not center:
        raise UnsupportedError("center=False; kernels of odd size are centred.")
    size = tuple(convert_to_int_list(kernel_size, dimension))
    steps = tuple(convert_to_int_list(dilation, dimension))
    region_type, listed = _resolved(region_type, region_offset, axis_types, size, dimension)
    region = kernel_region(region_type, size, steps, listed)
    up = convert_to_int_list(up_stride, dimension)
    scale = [t // u for t, u in zip(convert_to_int_list(tensor_stride, dimension), up, strict=True)]
    offsets = [[c * s for c, s in zip(point, scale, strict=True)] for point in region.points]
    furthest = max(abs(c) for offset in offsets for c in offset)
    if furthest > LARGEST_STRIDE:
        raise OverflowLimitError(
            f"a kernel offset of {furthest} leaves the 32-bit coordinate range; use less dilation or a smaller stride."
        )
    return region_type, torch.tensor(offsets, dtype=torch.int32), len(region)


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
        axis_types: HYPER_CUBE or HYPER_CROSS for every axis; where they differ, the region is
            HYBRID: the cube over its axes, and the cross's steps along each of the others.
        dimension: D, required.

    Raises: ContractError (an AssertionError).
    """

    @arguments_of_0_4("kernel_size stride dilation is_transpose region_type region_offsets axis_types dimension")
    def __init__(
        self,
        kernel_size=-1,
        stride=1,
        dilation=1,
        is_transpose=False,
        region_type=RegionType.HYPER_CUBE,
        region_offsets=None,
        expand_coordinates=False,
        axis_types=None,
        dimension=-1,
    ):
        if not is_count(dimension):
            raise ContractError(f"dimension={dimension!r}; a kernel needs its number of axes.")
        self._specs, self._kernels, self._met = {}, {}, set()
        region_type = member("region_type", region_type, RegionType)
        unsized = isinstance(kernel_size, int) and kernel_size < 0
        if region_type is RegionType.CUSTOM and unsized and region_offsets is not None:
            # The box that holds the offsets: it decides nothing but the layer's repr.
            points = custom_points(region_offsets, dimension)
            kernel_size = [1 + max(axis) - min(axis) for axis in zip(*points, strict=True)]
        self.kernel_size = convert_to_int_list(kernel_size, dimension, "kernel_size")
        self.kernel_stride = convert_to_int_list(stride, dimension, "stride")
        self.kernel_dilation = convert_to_int_list(dilation, dimension, "dilation")
        for name in ("kernel_size", "kernel_stride", "kernel_dilation"):
            if min(getattr(self, name)) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}; every entry must be 1 or more.")
            if max(getattr(self, name)) > LARGEST_STRIDE:
                raise OverflowLimitError(
                    f"{name} is {getattr(self, name)}; coordinates of 32 bits take at most {LARGEST_STRIDE}."
                )
        if region_type is RegionType.HYPER_CROSS and max(self.kernel_size) == 1:
            region_type, axis_types = RegionType.HYPER_CUBE, None
        region_type, self._listed = _resolved(region_type, region_offsets, axis_types, self.kernel_size, dimension)
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

    @property
    def stride(self):
        """0.4's name of `kernel_stride`."""
        return self.kernel_stride

    @property
    def dilation(self):
        """0.4's name of `kernel_dilation`."""
        return self.kernel_dilation

    def region(self):
        return kernel_region(self.region_type, tuple(self.kernel_size), tuple(self.kernel_dilation), self._listed)

    @property
    def cache(self):
        """{tensor stride: what `get_kernel` gives there}, of all that layers have met, too."""
        while self._met:
            self.get_kernel(*self._met.pop())
        return self._kernels

    def spec(self, transposed=False, key=None):
        """The kernel as the adapter's layers take it, of a forward or a transposed layer.  key: of the
        coordinates that it is used on."""
        if key is not None:
            self._met.add((key[0], transposed))
        size, stride = tuple(self.kernel_size), tuple(self.kernel_stride)
        now = (transposed, size, stride, tuple(self.kernel_dilation), self.region_type, self.expand_coordinates)
        spec = self._specs.get(now)
        if spec is None:
            expand = bool(self.expand_coordinates)
            spec = kernel_spec(self.region(), size, stride, expand, transposed)
            self._specs[now] = spec
        return spec

    def __getstate__(self):
        state = self.__dict__.items()
        return {name: value for name, value in state if name not in ("_specs", "_kernels", "_met")}

    def __setstate__(self, state):
        self.__dict__.update(state, _specs={}, _kernels={}, _met=set())

    def summary(self):
        """The kernel as a layer's `repr` shows it."""
        text = f"kernel_size={self.kernel_size}, "
        if self._listed is not None:
            region = f"RegionType.{self.region_type.name}"
            text = f"region_type={region}, kernel_volume={self.kernel_volume}, "
        return text + f"stride={self.kernel_stride}, dilation={self.kernel_dilation}"

    def get_kernel(self, tensor_stride, is_transpose):
        """(region type, absolute offsets, volume) on a tensor stride; `cache` keeps them, by the
        tensor stride that the offsets count on."""
        stride = convert_to_int_list(tensor_stride, self.dimension)
        if is_transpose:
            stride = [t // s for t, s in zip(stride, self.kernel_stride, strict=True)]
        region = self._kernels.get(tuple(stride))
        if region is None:
            region = self._kernels[tuple(stride)] = convert_region_type(
                self.region_type,
                stride,
                self.kernel_size,
                1,
                self.kernel_dilation,
                self.region_offsets,
                self.axis_types,
                self.dimension,
            )
        return region

    def __repr__(self):
        text = f"(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
        text += f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type.name}, "
        return (
            self.__class__.__name__
            + text
            + f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )


# What 0.4 kept on layers.
_OLD_ATTRIBUTES = frozenset(
    (
        "axis_types",
        "dilation",
        "kernel_size",
        "kernel_volume",
        "region_offset",
        "region_offset_",
        "region_type",
        "region_type_",
        "stride",
    )
)


class KernelLayer(MinkowskiModuleBase):
    """A layer with a `kernel_generator`, whose numbers it shows as attributes, as in 0.4: stride,
    dilation and kernel_size are IntTensors [D], region_offset(_) those of a listed region on a
    tensor stride of 1."""

    def _applied(self, function, input, coordinates, *arguments):
        """Features and key of what an autograd function makes that somebody gave to this layer."""
        from MinkowskiEngine.MinkowskiSparseTensor import _get_coordinate_map_key

        stride = self.kernel_generator.spec(self.is_transpose).scaled(input.tensor_stride)
        out_key = _get_coordinate_map_key(input, coordinates, stride)
        out = function.apply(input._F, *arguments, input.coordinate_map_key, out_key, input._manager)
        return out, out_key.key

    _functions = None  # autograd functions, forward and transposed: `conv` or `pooling`, which programs exchange

    def __getattr__(self, name):
        if name in ("conv", "pooling") and self._functions and name in self._functions[0].__name__.lower():
            return self._functions[self.is_transpose]()
        if name not in _OLD_ATTRIBUTES:
            return super().__getattr__(name)
        generator, name = super().__getattribute__("kernel_generator"), name.removesuffix("_")
        if name in ("kernel_volume", "region_type", "axis_types"):
            return getattr(generator, name)
        if name == "region_offset":
            if generator._listed is None:
                return torch.empty((0, generator.dimension), dtype=torch.int32)
            return generator.get_kernel([1] * generator.dimension, False)[1]
        numbers = getattr(generator, name if name == "kernel_size" else f"kernel_{name}")
        return torch.tensor(numbers, dtype=torch.int32)


def generator_of(generator, kernel_size, stride, dilation, dimension, **options):
    """A layer's generator: the one it was given, or one of its sizes.

    Raises: DimensionError (a TypeError and AssertionError), ContractError (an AssertionError), GeneratorTypeError (an
        AttributeError).
    """
    if not is_count(dimension):
        raise DimensionError(f"dimension={dimension!r}; expected 1 or more.")
    if isinstance(generator, KernelGenerator):
        return generator
    if generator is not None:
        raise GeneratorTypeError(f"kernel_generator is {generator!r}; expected an ME.KernelGenerator, or None.")
    if isinstance(kernel_size, int) and kernel_size < 1:
        raise ContractError(f"kernel_size={kernel_size}; expected 1 or more.")
    return KernelGenerator(kernel_size, stride, dilation, dimension=dimension, **options)
