"""Pooling layers."""

from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiKernelGenerator import generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, _get_coordinate_map_key
from MinkowskiEngine.sparse_matrix_functions import (
    ComposedFunction,
    MinkowskiDirectMaxPoolingFunction,
)
from MinkowskiEngineBackend._C import CoordinateMapKey, PoolingMode

from sparse_bridge.adapters.ledger import note
from sparse_bridge.adapters.minkowski import managing
from sparse_bridge.adapters.minkowski.arguments import drop_old
from sparse_bridge.adapters.minkowski.enums import base_mode
from sparse_bridge.adapters.minkowski.pools import (
    global_pooling,
    local_pooling,
    pool_items,
    transposed_pooling,
)
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


def _target(in_key, out_key):
    """(key object of the output, the key that was given or None)."""
    if out_key is None:
        out_key = CoordinateMapKey(in_key.get_coordinate_size())
    return out_key, out_key.key if out_key.is_key_set() else None


def _local(features, mode, generator, in_key, out_key, manager, what="local pooling"):
    out_key, given = _target(in_key, out_key)
    out, found = local_pooling(
        manager._manager, features, base_mode(mode), in_key.key, given, generator.spec(), what
    )
    if given is None:
        out_key.set_key(*found)
    return out, out_key


def _transposed(features, generator, in_key, out_key, manager, average=False):
    out_key, given = _target(in_key, out_key)
    out, found = transposed_pooling(
        manager._manager, features, in_key.key, given, generator.spec(), average
    )
    if given is None:
        out_key.set_key(*found)
    return out, out_key


class MinkowskiLocalPoolingFunction(ComposedFunction):
    """apply(features, pooling_mode, kernel_generator, in_key, out_key, manager)."""

    @staticmethod
    def compute(
        input_features, pooling_mode, kernel_generator, in_coordinate_map_key,
        out_coordinate_map_key=None, coordinate_manager=None,
    ):  # fmt: skip
        return _local(
            input_features, pooling_mode, kernel_generator, in_coordinate_map_key,
            out_coordinate_map_key, coordinate_manager,
        )[0]  # fmt: skip


class MinkowskiLocalPoolingTransposeFunction(ComposedFunction):
    """apply(features, pooling_mode, kernel_generator, in_key, out_key, manager); always sums."""

    @staticmethod
    def compute(
        input_features, pooling_mode, kernel_generator, in_coordinate_map_key,
        out_coordinate_map_key=None, coordinate_manager=None,
    ):  # fmt: skip
        return _transposed(
            input_features, kernel_generator, in_coordinate_map_key, out_coordinate_map_key,
            coordinate_manager,
        )[0]  # fmt: skip


class MinkowskiGlobalPoolingFunction(ComposedFunction):
    """apply(features, pooling_mode, in_key, out_key, manager)."""

    @staticmethod
    def compute(
        input_features, pooling_mode, in_coordinate_map_key, out_coordinate_map_key=None,
        coordinate_manager=None,
    ):  # fmt: skip
        out, found = global_pooling(
            coordinate_manager._manager, input_features, base_mode(pooling_mode),
            in_coordinate_map_key.key,
        )  # fmt: skip
        if out_coordinate_map_key is not None and not out_coordinate_map_key.is_key_set():
            out_coordinate_map_key.set_key(*found)
        return out


class MinkowskiPoolingBase(MinkowskiModuleBase):
    """Base of local pools. A kernel equal to its stride bins inputs into cells; others are windows.

    Args: kernel_size, stride, dilation: int or one per axis; kernel_generator overrides them;
        dimension: D, required.
    Raises: DimensionError, ContractError (both AssertionErrors).
    """

    def __init__(
        self, kernel_size, stride=1, dilation=1, kernel_generator=None, is_transpose=False,
        pooling_mode=PoolingMode.LOCAL_AVG_POOLING, dimension=-1,
    ):  # fmt: skip
        super().__init__()
        kernel_generator = generator_of(
            kernel_generator, kernel_size, stride, dilation, dimension, is_transpose=is_transpose
        )
        self.is_transpose = is_transpose
        self.kernel_generator = kernel_generator
        self.pooling_mode = pooling_mode
        self.dimension = dimension

    def forward(self, input, coordinates=None):
        """SparseTensor -> SparseTensor; `coordinates` as in a convolution.

        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        what = type(self).__name__
        if not isinstance(input, SparseTensor):
            raise ContractError(f"{what} takes a SparseTensor, got {type(input).__name__}.")
        if self.dimension != input.D:
            raise ContractError(
                f"{what} has dimension {self.dimension}, its input has D={input.D}."
            )
        stride = 1 if coordinates is None else self._given_stride(input)
        given = _get_coordinate_map_key(input, coordinates, stride)
        out, key = self._pool(input, given)
        note("minkowski", what)
        return SparseTensor(out, coordinate_map_key=key, coordinate_manager=input._manager)

    def _pool(self, input, given):
        return _local(
            input.F, self.pooling_mode, self.kernel_generator, input.coordinate_map_key, given,
            input._manager, type(self).__name__,
        )  # fmt: skip

    def _given_stride(self, input):
        pairs = zip(input.tensor_stride, self.kernel_generator.kernel_stride, strict=True)
        return [t // s if self.is_transpose else t * s for t, s in pairs]

    def __repr__(self):
        generator = self.kernel_generator
        return (
            f"{self.__class__.__name__}(kernel_size={generator.kernel_size}, "
            f"stride={generator.kernel_stride}, dilation={generator.kernel_dilation})"
        )


class MinkowskiAvgPooling(MinkowskiPoolingBase):
    """Mean of the present inputs; 0 where there is none."""

    def __init__(
        self, kernel_size=-1, stride=1, dilation=1, kernel_generator=None, dimension=None
    ):  # fmt: skip
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_AVG_POOLING,
            dimension,
        )  # fmt: skip


class MinkowskiSumPooling(MinkowskiPoolingBase):
    """Sum of the inputs."""

    def __init__(self, kernel_size, stride=1, dilation=1, kernel_generator=None, dimension=None):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_SUM_POOLING,
            dimension,
        )  # fmt: skip


class MinkowskiMaxPooling(MinkowskiPoolingBase):
    """Maximum of the present inputs; 0 where there is none. Ties: the smallest row gets the
    gradient. A NaN is the largest."""

    def __init__(self, kernel_size, stride=1, dilation=1, kernel_generator=None, dimension=None):
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, False, PoolingMode.LOCAL_MAX_POOLING,
            dimension,
        )  # fmt: skip


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Sum of the contributing coarse inputs at every finer coordinate (which are those of a
    transposed convolution); a kernel equal to its stride copies the parent."""

    _average = False

    def __init__(
        self, kernel_size, stride, dilation=1, kernel_generator=None, expand_coordinates=False,
        dimension=None,
    ):  # fmt: skip
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, True, PoolingMode.LOCAL_AVG_POOLING,
            dimension,
        )  # fmt: skip
        self.kernel_generator.expand_coordinates = expand_coordinates

    def _pool(self, input, given):
        return _transposed(
            input.F, self.kernel_generator, input.coordinate_map_key, given, input._manager,
            self._average,
        )  # fmt: skip


class MinkowskiAvgUnpooling(MinkowskiPoolingTranspose):
    """The unpooling of 0.4: the mean of the contributing inputs."""

    _average = True


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """Reduces every batch item: rows by ascending batch index, coordinates (b, 0, .., 0).

    mode: a PoolingMode of sum, avg or max. Takes SparseTensors and TensorFields.
    """

    def __init__(self, mode=PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX, **old):
        super().__init__()
        drop_old(type(self).__name__, old, ("average", "dimension", "D"))
        if isinstance(mode, bool):  # 0.4's first argument was `average`
            old = {"average": mode}
            mode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX
        if old.get("average") is False:
            mode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX
        if not isinstance(mode, PoolingMode) or mode < PoolingMode.GLOBAL_SUM_POOLING_DEFAULT:
            raise ContractError(f"{mode!r} is not a global PoolingMode.")
        self.pooling_mode = mode

    def forward(self, input, coordinates=None):
        from MinkowskiEngine.MinkowskiTensorField import TensorField

        mode, registry = base_mode(self.pooling_mode), input._manager._manager
        if isinstance(input, TensorField):
            key = registry.origin()
            items = managing.field_items(registry, input.coordinate_field_map_key.key, key)
            out = pool_items(input.F, items, registry.grid(key).n_rows, mode)
        else:
            out, key = global_pooling(registry, input.F, mode, input.coordinate_map_key.key)
        note("minkowski", type(self).__name__)
        return SparseTensor(
            out, coordinate_map_key=CoordinateMapKey.of(key), coordinate_manager=input._manager
        )

    def __repr__(self):
        return f"{self.__class__.__name__}(mode={self.pooling_mode!s})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """Sum of every batch item."""

    def __init__(self, mode=PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX, **old):
        super().__init__(mode, **old)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """Mean of every batch item."""

    def __init__(self, mode=PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX, **old):
        super().__init__(mode, **old)


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """Maximum of every batch item."""

    def __init__(self, mode=PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX, **old):
        super().__init__(mode, **old)
