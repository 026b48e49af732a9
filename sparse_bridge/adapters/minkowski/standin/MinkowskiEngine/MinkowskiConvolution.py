"""Convolution layers."""

import math

import torch
from MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator, KernelLayer, generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, _get_coordinate_map_key, refuse_input
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import ConvolutionMode
from torch.nn import Parameter

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.channels import check_channels
from sparse_bridge.adapters.minkowski import profile
from sparse_bridge.adapters.minkowski.conv import collapsed, convolve, fold, pointwise
from sparse_bridge.adapters.minkowski.errors import StrideError
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import checked
from sparse_bridge.adapters.minkowski.upstream.keys import fill, given_by
from sparse_bridge.adapters.minkowski.weights import check_aligned, expected
from sparse_bridge.adapters.warmup_registry import expect

__all__ = [
    "MinkowskiConvolution",
    "MinkowskiConvolutionBase",
    "MinkowskiConvolutionFunction",
    "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction",
    "MinkowskiGenerativeConvolutionTranspose",
]

_SHARED = "in_channels out_channels kernel_size stride dilation has_bias=bias kernel_generator"


def _function(transposed, layer_name):
    """`compute` of an autograd function; fills in an unset output key."""

    def compute(
        input_features,
        kernel_weights,
        kernel_generator,
        convolution_mode,
        in_coordinate_map_key,
        out_coordinate_map_key=None,
        coordinate_manager=None,
    ):
        registry, in_key = coordinate_manager._manager, in_coordinate_map_key.key
        check_aligned(input_features, registry.grid(in_key), layer_name)
        layer_map = registry.layer_map(
            in_key, kernel_generator.spec(transposed, in_key), given_by(out_coordinate_map_key)
        )
        out = convolve(input_features, kernel_weights, None, layer_map.kmap, layer_name)
        fill(out_coordinate_map_key, layer_map.key)
        return out

    return staticmethod(compute)


class MinkowskiConvolutionFunction(ComposedFunction):
    """apply(features, kernel, kernel_generator, convolution_mode, in_key, out_key, manager).

    Or 0.4's arguments: features, kernel, tensor_stride, stride, kernel_size, dilation, region_type,
    region_offset, in_key, out_key, manager.
    """

    compute = _function(False, "MinkowskiConvolution")

    @classmethod
    def apply(cls, *args, **kwargs):
        if len(args) > 8 and not isinstance(args[2], KernelGenerator):
            args = cls._from_old(*args)
        return cls.compute(*args, **kwargs)

    @classmethod
    def _from_old(cls, features, kernel, *arguments):
        from MinkowskiEngine.old_functions import old_generator

        finer = cls is not MinkowskiConvolutionFunction
        kernel_arguments, arguments = arguments[:6], arguments[6:]
        expand, keys = (arguments[0], arguments[1:]) if finer and isinstance(arguments[0], bool) else (0, arguments)
        generator = old_generator(*kernel_arguments, keys[0], finer)
        generator.expand_coordinates = bool(expand)
        return (features, kernel, generator, ConvolutionMode.DEFAULT, *keys)


class MinkowskiConvolutionTransposeFunction(MinkowskiConvolutionFunction):
    """As `MinkowskiConvolutionFunction`; 0.4 had generate_new_coords before in_key."""

    compute = _function(True, "MinkowskiConvolutionTranspose")


_FUNCTIONS = MinkowskiConvolutionFunction, MinkowskiConvolutionTransposeFunction
_MEMBERS = vars(MinkowskiConvolutionFunction)
_APPLY = _MEMBERS["apply"]


class MinkowskiConvolutionBase(KernelLayer):
    """A convolution with `kernel` [V, C_in, C_out] and `bias` [1, C_out].

    A kernel of volume 1 and stride 1 is [C_in, C_out], a plain matrix product (`use_mm`); with one
    axis it has that shape at any stride.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride, dilation: int or one per axis.
        bias: whether there is one.
        kernel_generator: overrides size, stride and dilation.
        is_transpose, expand_coordinates, convolution_mode: see the subclasses.
        dimension: D, required.

    Raises: DimensionError (a TypeError and AssertionError), ContractError (an AssertionError).
    """

    _functions = _FUNCTIONS

    @arguments_of_0_4(f"{_SHARED} is_transpose dimension")
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        is_transpose=False,
        expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT,
        dimension=-1,
    ):
        super().__init__()
        checked("convolution_mode", convolution_mode, ConvolutionMode)
        check_channels({"in_channels": in_channels, "out_channels": out_channels})
        if isinstance(kernel_generator, bool):  # releases before 0.4.3: generate_new_coords
            expand_coordinates, kernel_generator = kernel_generator, None
        kernel_generator = generator_of(kernel_generator, kernel_size, stride, dilation, dimension)
        kernel_generator.expand_coordinates = expand_coordinates
        self.is_transpose = is_transpose
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_generator = kernel_generator
        self.dimension = dimension
        self.convolution_mode = convolution_mode
        self.use_mm = kernel_generator.kernel_volume == 1 and not kernel_generator.requires_strided_coordinates
        shape = (in_channels, out_channels)
        if kernel_generator.kernel_volume > 1 or (not self.use_mm and dimension > 1):
            shape = (kernel_generator.kernel_volume, *shape)
        self.kernel = Parameter(torch.empty(shape, dtype=torch.float32))
        self.register_parameter("bias", Parameter(torch.empty(1, out_channels)) if bias else None)
        self.reset_parameters(is_transpose)
        expect(self, expected)

    @property
    def has_bias(self):
        """0.4's attribute."""
        return self.bias is not None

    @property
    def kernel_shape(self):
        """0.4's attribute: the shape of `kernel`, a tuple."""
        return tuple(self.kernel.shape)

    def reset_parameters(self, is_transpose=False):
        """Uniform in +-1 / sqrt(channels * volume); output channels for transposed layers."""
        with torch.no_grad():
            channels = self.out_channels if is_transpose else self.in_channels
            bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
            self.kernel.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, input, coordinates=None, coords=None):
        """SparseTensor -> SparseTensor.

        coordinates: where to compute: an IntTensor [M, D + 1], a CoordinateMapKey or a SparseTensor
            of the same manager; None for the layer's own rule. `use_mm` layers ignore it; `coords` in 0.4.
        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        if coords is not None:
            coordinates = coords
        if not isinstance(input, SparseTensor) or self.dimension != input._D:
            refuse_input(self, input)
        layer_name, manager = type(self).__name__, input._manager
        parameters, kind = self._parameters, type(self)  # as `hooks.parameters_of`, without a call
        if "kernel" not in parameters or "bias" not in parameters or hasattr(kind, "kernel") or hasattr(kind, "bias"):
            kernel, bias = self.kernel, self.bias
        else:
            kernel, bias = parameters["kernel"], parameters["bias"]
        compiling = torch.compiler.is_compiling()
        if self.use_mm:
            output = input._with(pointwise(input._F, kernel, bias, layer_name, self))
        elif "conv" in self.__dict__ or hasattr(type(self), "conv") or not (compiling or _MEMBERS["apply"] is _APPLY):
            y, key = self._applied(self.conv, input, coordinates, kernel, self.kernel_generator, self.convolution_mode)
            output = SparseTensor._of(y if bias is None else y + bias, key, manager)
        elif compiling:
            return self._traced(input, coordinates, kernel, bias)
        elif coordinates is None:
            in_key, registry = input.coordinate_map_key._key, manager._manager
            spec = self.kernel_generator.spec(self.is_transpose, in_key)
            try:
                key, kmap = registry.layer_map(in_key, spec)
            except StrideError:
                kernel, (key, kmap) = fold(registry, input.coordinate_map_key.key, spec, kernel)
            y = convolve(input._F, kernel, bias, kmap, layer_name, self)
            output = SparseTensor._of(y, key, manager)
        else:
            output = self._convolve_at(coordinates, input, kernel, bias)
        note("minkowski", layer_name)
        return output

    def _traced(self, input, coordinates, kernel, bias):
        """In a graph; where that cannot be, between two graphs."""
        from sparse_bridge.adapters.minkowski import compiled

        key = compiled.graph_output_key(self, input, coordinates)
        if key is None:
            return compiled.outside(type(self).forward, self, input, coordinates)
        features = compiled.convolved(self, input, kernel, bias, key)
        return SparseTensor._of(features, key, input._manager)

    def _convolve_at(self, coordinates, input, kernel, bias):
        in_key, registry = input.coordinate_map_key.key, input._manager._manager
        spec = self.kernel_generator.spec(self.is_transpose, in_key)
        out_map_key = _get_coordinate_map_key(input, coordinates, spec.scaled(input.tensor_stride))
        key = given_by(out_map_key)
        labelled_zero = isinstance(coordinates, torch.Tensor) and not profile.is_old()
        if spec.transposed and not spec.expand and labelled_zero:
            kernel, kmap = collapsed(registry, in_key, key, kernel)
        else:
            key, kmap = registry.layer_map(in_key, spec, key)
            fill(out_map_key, key)
        out = convolve(input._F, kernel, bias, kmap, type(self).__name__)
        return SparseTensor._of(out, key, input._manager)

    def __repr__(self):
        channels = f"in={self.in_channels}, out={self.out_channels}"
        return f"{type(self).__name__}({channels}, {self.kernel_generator.summary()})"


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """y[u] = sum over offsets o of x[u + o * dilation * tensor stride] @ kernel[o].

    Stride 1 keeps the coordinates, a larger one takes the cells of the coarser grid, and
    expand_coordinates makes every coordinate that the kernel reaches.
    """

    @arguments_of_0_4(f"{_SHARED} dimension")
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT,
        dimension=None,
    ):
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            False,
            expand_coordinates=expand_coordinates,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """The adjoint of a convolution. Writes to the map known at the finer stride, if there is one.

    expand_coordinates: always make new coordinates, all that the kernel reaches.
    """

    @arguments_of_0_4(f"{_SHARED} generate_new_coords=expand_coordinates dimension")
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT,
        dimension=None,
    ):
        if kernel_generator is None and dimension is not None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, is_transpose=True, dimension=dimension)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            True,
            expand_coordinates=expand_coordinates,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )

    @property
    def generate_new_coords(self):
        """0.4's name of `expand_coordinates`."""
        return bool(self.kernel_generator.expand_coordinates)


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """A transposed convolution onto new coordinates: all that the kernel reaches, at every call."""

    @arguments_of_0_4(f"{_SHARED} dimension")
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        convolution_mode=ConvolutionMode.DEFAULT,
        dimension=None,
    ):
        if kernel_generator is None and dimension is not None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, is_transpose=True, expand_coordinates=True, dimension=dimension
            )
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            True,
            expand_coordinates=True,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )
