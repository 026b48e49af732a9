"""Convolution layers."""

import math

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator, generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, _get_coordinate_map_key
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import ConvolutionMode, CoordinateMapKey
from torch.nn import Parameter

from sparse_bridge.adapters.expected import expect
from sparse_bridge.adapters.ledger import note
from sparse_bridge.adapters.minkowski.arguments import drop_old
from sparse_bridge.adapters.minkowski.convolve import (
    convolution,
    expected,
    pointwise,
    transposed_convolution,
)
from sparse_bridge.errors import ContractError

__all__ = [
    "MinkowskiConvolution",
    "MinkowskiConvolutionBase",
    "MinkowskiConvolutionFunction",
    "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction",
    "MinkowskiGenerativeConvolutionTranspose",
]


def _run(operation, features, kernel, generator, in_key, out_key, manager, bias=None, **named):
    """Run a convolution and fill in an unset `out_key`."""
    if out_key is None:
        out_key = CoordinateMapKey(in_key.get_coordinate_size())
    given = out_key.key if out_key.is_key_set() else None
    out, found = operation(
        manager._manager, features, kernel, bias, in_key.key, given, generator.spec(), **named
    )
    if given is None:
        out_key.set_key(*found)
    return out, out_key


class MinkowskiConvolutionFunction(ComposedFunction):
    """apply(features, kernel, kernel_generator, convolution_mode, in_key, out_key, manager)."""

    @staticmethod
    def compute(
        input_features, kernel_weights, kernel_generator, convolution_mode,
        in_coordinate_map_key, out_coordinate_map_key=None, coordinate_manager=None,
    ):  # fmt: skip
        return _run(
            convolution, input_features, kernel_weights, kernel_generator, in_coordinate_map_key,
            out_coordinate_map_key, coordinate_manager,
        )[0]  # fmt: skip


class MinkowskiConvolutionTransposeFunction(ComposedFunction):
    """apply(features, kernel, kernel_generator, convolution_mode, in_key, out_key, manager)."""

    @staticmethod
    def compute(
        input_features, kernel_weights, kernel_generator, convolution_mode,
        in_coordinate_map_key, out_coordinate_map_key=None, coordinate_manager=None,
    ):  # fmt: skip
        return _run(
            transposed_convolution, input_features, kernel_weights, kernel_generator,
            in_coordinate_map_key, out_coordinate_map_key, coordinate_manager,
        )[0]  # fmt: skip


class MinkowskiConvolutionBase(MinkowskiModuleBase):
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

    def __init__(
        self, in_channels, out_channels, kernel_size=-1, stride=1, dilation=1, bias=False,
        kernel_generator=None, is_transpose=False, expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT, dimension=-1, **old,
    ):  # fmt: skip
        super().__init__()
        bias = old.pop("has_bias", bias)
        if is_transpose:
            expand_coordinates = old.pop("generate_new_coords", expand_coordinates)
        drop_old(type(self).__name__, old, ())
        kernel_generator = generator_of(kernel_generator, kernel_size, stride, dilation, dimension)
        kernel_generator.expand_coordinates = expand_coordinates
        self.is_transpose = is_transpose
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_generator = kernel_generator
        self.dimension = dimension
        self.convolution_mode = convolution_mode
        self.use_mm = (
            kernel_generator.kernel_volume == 1
            and not kernel_generator.requires_strided_coordinates
        )
        shape = (in_channels, out_channels)
        if kernel_generator.kernel_volume > 1 or (not self.use_mm and dimension > 1):
            shape = (kernel_generator.kernel_volume, *shape)
        self.kernel = Parameter(torch.empty(shape, dtype=torch.float32))
        self.bias = Parameter(torch.empty(1, out_channels)) if bias else None
        self.reset_parameters(is_transpose)
        expect(self, expected)

    def reset_parameters(self, is_transpose=False):
        """Uniform in +-1 / sqrt(channels * volume); output channels for transposed layers."""
        with torch.no_grad():
            channels = self.out_channels if is_transpose else self.in_channels
            bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
            self.kernel.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, input, coordinates=None):
        """SparseTensor -> SparseTensor.

        coordinates: where to compute: an IntTensor [M, D + 1], a CoordinateMapKey or a SparseTensor
            of the same manager; None for the layer's own rule. `use_mm` layers ignore it.
        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        what = type(self).__name__
        if not isinstance(input, SparseTensor):
            raise ContractError(f"{what} takes a SparseTensor, got {type(input).__name__}.")
        if self.dimension != input.D:
            raise ContractError(
                f"{what} has dimension {self.dimension}, its input has D={input.D}."
            )
        if self.use_mm:
            out, out_key = (
                pointwise(input.F, self.kernel, self.bias, what),
                input.coordinate_map_key,
            )
        else:
            out, out_key = self._convolve(input, coordinates, what)
        note("minkowski", what)
        return SparseTensor(out, coordinate_map_key=out_key, coordinate_manager=input._manager)

    def _convolve(self, input, coordinates, what):
        stride = self._given_stride(input) if coordinates is not None else 1
        out_key = _get_coordinate_map_key(input, coordinates, stride)
        operation, named = convolution, {"what": what}
        if self.is_transpose:
            operation = transposed_convolution
            given = isinstance(coordinates, torch.Tensor)
            named["collapsed"] = given and not self.kernel_generator.expand_coordinates
        return _run(
            operation, input.F, self.kernel, self.kernel_generator, input.coordinate_map_key,
            out_key, input._manager, self.bias, **named,
        )  # fmt: skip

    def _given_stride(self, input):
        """Tensor stride of coordinates that are given as a tensor."""
        pairs = zip(input.tensor_stride, self.kernel_generator.kernel_stride, strict=True)
        return [t // s if self.is_transpose else t * s for t, s in pairs]

    def __repr__(self):
        generator = self.kernel_generator
        text = f"{self.__class__.__name__}(in={self.in_channels}, out={self.out_channels}, "
        if generator.region_type.name == "CUSTOM":
            text += f"region_type={generator.region_type}, "
            text += f"kernel_volume={generator.kernel_volume}, "
        else:
            text += f"kernel_size={generator.kernel_size}, "
        return text + f"stride={generator.kernel_stride}, dilation={generator.kernel_dilation})"


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """y[u] = sum over offsets o of x[u + o * dilation * tensor stride] @ kernel[o].

    Stride 1 keeps the coordinates, a larger one takes the cells of the coarser grid, and
    expand_coordinates makes every coordinate that the kernel reaches.
    """

    def __init__(
        self, in_channels, out_channels, kernel_size=-1, stride=1, dilation=1, bias=False,
        kernel_generator=None, expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT, dimension=None, **old,
    ):  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator,
            False, expand_coordinates, convolution_mode, dimension, **old,
        )  # fmt: skip


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """The adjoint of a convolution. Writes to the map known at the finer stride, if there is one.

    expand_coordinates: always make new coordinates, all that the kernel reaches.
    """

    def __init__(
        self, in_channels, out_channels, kernel_size=-1, stride=1, dilation=1, bias=False,
        kernel_generator=None, expand_coordinates=False,
        convolution_mode=ConvolutionMode.DEFAULT, dimension=None, **old,
    ):  # fmt: skip
        if kernel_generator is None and dimension is not None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, is_transpose=True, dimension=dimension
            )
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator,
            True, expand_coordinates, convolution_mode, dimension, **old,
        )  # fmt: skip


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """A transposed convolution onto new coordinates: all that the kernel reaches, at every call."""

    def __init__(
        self, in_channels, out_channels, kernel_size=-1, stride=1, dilation=1, bias=False,
        kernel_generator=None, convolution_mode=ConvolutionMode.DEFAULT, dimension=None, **old,
    ):  # fmt: skip
        if kernel_generator is None and dimension is not None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, is_transpose=True, expand_coordinates=True,
                dimension=dimension,
            )  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, dilation, bias, kernel_generator,
            True, True, convolution_mode, dimension, **old,
        )  # fmt: skip
