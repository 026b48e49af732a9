"""Pooling layers."""

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiKernelGenerator import KernelLayer, generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, _get_coordinate_map_key, refuse_input
from MinkowskiEngine.MinkowskiTensor import expect_kind
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction, MinkowskiDirectMaxPoolingFunction
from MinkowskiEngineBackend._C import CoordinateMapKey, GlobalPoolingMode, PoolingMode

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.minkowski.pool import global_pooling, local_pooling, transposed_pooling
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import base_mode, checked, member
from sparse_bridge.adapters.minkowski.upstream.keys import fill, given_by
from sparse_bridge.errors import ContractError

__all__ = [
    "MinkowskiAvgPooling",
    "MinkowskiAvgUnpooling",
    "MinkowskiDirectMaxPoolingFunction",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalPoolingFunction",
    "MinkowskiGlobalSumPooling",
    "MinkowskiLocalPoolingFunction",
    "MinkowskiLocalPoolingTransposeFunction",
    "MinkowskiMaxPooling",
    "MinkowskiPoolingBase",
    "MinkowskiPoolingTranspose",
    "MinkowskiSumPooling",
]

_LOCAL_AVG = PoolingMode.LOCAL_AVG_POOLING


def _checked_mode(mode):
    return base_mode(member("pooling_mode", mode, PoolingMode))


def _is_bool(*arguments):
    return isinstance(arguments[0], bool)


class MinkowskiLocalPoolingFunction(ComposedFunction):
    """apply(features, pooling_mode, kernel_generator, in_key, out_key, manager)."""

    @staticmethod
    def compute(
        input_features,
        pooling_mode,
        kernel_generator,
        in_coordinate_map_key,
        out_coordinate_map_key=None,
        coordinate_manager=None,
    ):
        out, out_key = local_pooling(
            coordinate_manager._manager,
            input_features,
            _checked_mode(pooling_mode),
            in_coordinate_map_key.key,
            kernel_generator.spec(False, in_coordinate_map_key.key),
            given_by(out_coordinate_map_key),
        )
        fill(out_coordinate_map_key, out_key)
        return out


class MinkowskiLocalPoolingTransposeFunction(ComposedFunction):
    """apply(features, pooling_mode, kernel_generator, in_key, out_key, manager); always sums."""

    @staticmethod
    def compute(
        input_features,
        pooling_mode,
        kernel_generator,
        in_coordinate_map_key,
        out_coordinate_map_key=None,
        coordinate_manager=None,
    ):
        out, out_key = transposed_pooling(
            coordinate_manager._manager,
            input_features,
            "sum",
            in_coordinate_map_key.key,
            kernel_generator.spec(True, in_coordinate_map_key.key),
            given_by(out_coordinate_map_key),
        )
        fill(out_coordinate_map_key, out_key)
        return out


class MinkowskiGlobalPoolingFunction(ComposedFunction):
    """apply(features, pooling_mode, in_key, out_key, manager).

    Or 0.4's arguments: features, average, mode, in_key, out_key, manager.
    """

    @classmethod
    def apply(cls, *args, **kwargs):
        if len(args) > 1 and isinstance(args[1], bool):
            mode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX
            mode = mode if args[1] else PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX
            args = (args[0], mode, *args[3:])
        return cls.compute(*args, **kwargs)

    @staticmethod
    def compute(
        input_features, pooling_mode, in_coordinate_map_key, out_coordinate_map_key=None, coordinate_manager=None
    ):
        out, out_key = global_pooling(
            coordinate_manager._manager, input_features, _checked_mode(pooling_mode), in_coordinate_map_key.key
        )
        fill(out_coordinate_map_key, out_key)
        return out


_FUNCTIONS = MinkowskiLocalPoolingFunction, MinkowskiLocalPoolingTransposeFunction, MinkowskiGlobalPoolingFunction
_APPLY = [function.apply.__func__ for function in _FUNCTIONS]


def _own_function(layer):
    """The autograd function of a pool, where somebody exchanged it or its `apply`."""
    if "pooling" in layer.__dict__ or hasattr(type(layer), "pooling"):
        return layer.pooling
    if torch.compiler.is_compiling() or [function.apply.__func__ for function in _FUNCTIONS] == _APPLY:
        return None
    return layer.pooling


class MinkowskiPoolingBase(KernelLayer):
    """Base of local pools. A kernel equal to its stride bins inputs into cells; others are windows.

    Args: kernel_size, stride, dilation: int or one per axis; kernel_generator overrides them;
        dimension: D, required.  pooling_mode: a PoolingMode; in 0.4 whether to average.
    Raises: DimensionError, ContractError (both AssertionErrors).
    """

    _functions = _FUNCTIONS[:2]

    @arguments_of_0_4("kernel_size stride dilation kernel_generator is_transpose average=pooling_mode dimension")
    def __init__(
        self,
        kernel_size,
        stride=1,
        dilation=1,
        kernel_generator=None,
        is_transpose=False,
        pooling_mode=PoolingMode.LOCAL_AVG_POOLING,
        dimension=-1,
    ):
        super().__init__()
        if isinstance(pooling_mode, bool):
            pooling_mode = _LOCAL_AVG if pooling_mode else PoolingMode.LOCAL_SUM_POOLING
        checked("pooling_mode", pooling_mode, PoolingMode)
        kernel_generator = generator_of(
            kernel_generator, kernel_size, stride, dilation, dimension, is_transpose=is_transpose
        )
        self.is_transpose = is_transpose
        self.kernel_generator = kernel_generator
        self.pooling_mode = pooling_mode
        self.dimension = dimension

    def forward(self, input, coordinates=None, coords=None):
        """SparseTensor -> SparseTensor; `coordinates` as in a convolution.

        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        if not isinstance(input, SparseTensor) or self.dimension != input._D:
            refuse_input(self, input)
        coordinates = coords if coordinates is None else coordinates
        function = _own_function(self)
        if function is not None:
            arguments = self.pooling_mode, self.kernel_generator
            out, key = self._applied(function, input, coordinates, *arguments)
            note("minkowski", type(self).__name__)
            return SparseTensor._of(out, key, input._manager)
        if torch.compiler.is_compiling():
            return self._traced(input, coordinates)
        in_key = input.coordinate_map_key.key
        spec, out_map_key = self.kernel_generator.spec(self.is_transpose, in_key), None
        if coordinates is not None:
            stride = spec.scaled(input.tensor_stride)
            out_map_key = _get_coordinate_map_key(input, coordinates, stride)
        out, key = self._pool(input._manager._manager, input._F, self._mode(), in_key, spec, given_by(out_map_key))
        fill(out_map_key, key)
        note("minkowski", type(self).__name__)
        return SparseTensor._of(out, key, input._manager)

    def _traced(self, input, coordinates):
        """In a graph; where that cannot be, between two graphs."""
        from sparse_bridge.adapters.minkowski import compiled

        key = compiled.graph_output_key(self, input, coordinates)
        if key is None:
            return compiled.outside(MinkowskiPoolingBase.forward, self, input, coordinates)
        features = compiled.pooled(self, input, self._mode(), key)
        return SparseTensor._of(features, key, input._manager)

    _pool = staticmethod(local_pooling)

    def _mode(self):
        return base_mode(self.pooling_mode)

    @property
    def average(self):
        """0.4's attribute: whether it takes means."""
        return self._mode() == "avg"

    def __repr__(self):
        generator = self.kernel_generator
        return (
            f"{self.__class__.__name__}(kernel_size={generator.kernel_size}, "
            f"stride={generator.kernel_stride}, dilation={generator.kernel_dilation})"
        )


class MinkowskiAvgPooling(MinkowskiPoolingBase):
    """Mean of the present inputs; 0 where there is none."""

    def __init__(self, kernel_size=-1, stride=1, dilation=1, kernel_generator=None, dimension=None):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_AVG_POOLING, dimension
        )


class MinkowskiSumPooling(MinkowskiPoolingBase):
    """Sum of the inputs."""

    def __init__(self, kernel_size, stride=1, dilation=1, kernel_generator=None, dimension=None):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_SUM_POOLING, dimension
        )


class MinkowskiMaxPooling(MinkowskiPoolingBase):
    """Maximum of the present inputs; 0 where there is none. Ties: the smallest row gets the
    gradient. A NaN is the largest."""

    def __init__(self, kernel_size, stride=1, dilation=1, kernel_generator=None, dimension=None):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_MAX_POOLING, dimension
        )


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Sum of the contributing coarse inputs at every finer coordinate (which are those of a
    transposed convolution); a kernel equal to its stride copies the parent."""

    @arguments_of_0_4("kernel_size stride dilation kernel_generator dimension")
    def __init__(
        self, kernel_size, stride, dilation=1, kernel_generator=None, expand_coordinates=False, dimension=None
    ):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, True, PoolingMode.LOCAL_AVG_POOLING, dimension
        )
        self.kernel_generator.expand_coordinates = expand_coordinates

    _pool = staticmethod(transposed_pooling)

    def _mode(self):
        return "sum"


class MinkowskiAvgUnpooling(MinkowskiPoolingTranspose):
    """The unpooling of 0.4: the mean of the contributing inputs."""

    def _mode(self):
        return "avg"


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """Reduces every batch item of SparseTensors and TensorFields: ascending batch index, coordinates (b, 0, .., 0).

    mode: a PoolingMode of sum, avg or max; in 0.4 `average` and a GlobalPoolingMode, which both are attributes.
    """

    _mode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX

    @arguments_of_0_4("average mode", also="dimension D", recognised=_is_bool)
    def __init__(self, mode=_mode, *, average=True):
        super().__init__()
        self.mode, mode = (mode, self._mode) if isinstance(mode, GlobalPoolingMode) else (GlobalPoolingMode.AUTO, mode)
        if not checked("average", average, bool):
            mode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX
        if not isinstance(mode, PoolingMode) or mode < PoolingMode.GLOBAL_SUM_POOLING_DEFAULT:
            raise ContractError(f"{mode!r} is not a global PoolingMode.")
        self.pooling_mode = mode

    def __getattr__(self, name):
        return MinkowskiGlobalPoolingFunction() if name == "pooling" else super().__getattr__(name)

    @property
    def average(self):
        """0.4's attribute: whether it takes means."""
        return base_mode(self.pooling_mode) == "avg"

    def forward(self, input, coordinates=None):
        expect_kind(self, input)
        operands = input._manager._manager, input._F, base_mode(self.pooling_mode), input._map_key.key
        function = _own_function(self)
        if function is not None:
            out_key = CoordinateMapKey(input.coordinate_map_key.get_coordinate_size())
            keys = input.coordinate_map_key, out_key, input._manager
            out, key = function.apply(input._F, self.pooling_mode, *keys), out_key.key
        elif torch.compiler.is_compiling():
            from sparse_bridge.adapters.minkowski import compiled

            if compiled.traced_sites(operands[0], operands[3]) is None:
                return compiled.outside(MinkowskiGlobalPooling.forward, self, input)
            out, key = compiled.pooled_globally(*operands)
        else:
            out, key = global_pooling(*operands)
        note("minkowski", type(self).__name__)
        return SparseTensor._of(out, key, input._manager)

    def __repr__(self):
        return f"{self.__class__.__name__}(mode={self.pooling_mode!s})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """Sum of every batch item."""

    _mode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX

    @arguments_of_0_4("mode", also="dimension D")
    def __init__(self, mode=_mode):
        super().__init__(mode=mode)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """Mean of every batch item."""

    _mode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX

    @arguments_of_0_4("mode", also="dimension D")
    def __init__(self, mode=_mode):
        super().__init__(mode=mode)


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """Maximum of every batch item."""

    _mode = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX

    @arguments_of_0_4("mode", also="dimension D")
    def __init__(self, mode=_mode):
        super().__init__(mode=mode)
