"""Joining a global tensor, one row per batch item, with every row of its item."""

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import BroadcastMode, OperationType

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.minkowski.errors import FeatureShapeError, FeatureTypeError
from sparse_bridge.adapters.minkowski.rows import broadcast
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import checked, member
from sparse_bridge.errors import ContractError

__all__ = [
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastBase",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastFunction",
    "MinkowskiBroadcastMultiplication",
]


class MinkowskiBroadcastFunction(ComposedFunction):
    """apply(features, glob_features, broadcast_mode, in_key, glob_key, manager)."""

    @staticmethod
    def compute(input_features, input_features_global, operation_type, in_coords_key, glob_coords_key, coords_manager):
        if input_features.shape[1] != input_features_global.shape[1]:
            raise FeatureShapeError(
                f"a global tensor of {input_features_global.shape[1]} channels for one of "
                f"{input_features.shape[1]}; both must agree."
            )
        if input_features.dtype != input_features_global.dtype and not torch.is_autocast_enabled(
            input_features.device.type
        ):
            raise FeatureTypeError(
                f"features are {input_features.dtype} and {input_features_global.dtype}; both must agree."
            )
        spread = broadcast(coords_manager._manager, input_features_global, in_coords_key.key, glob_coords_key.key)
        mode = member("operation_type", operation_type, BroadcastMode)
        if mode is BroadcastMode.ELEMENTWISE_MULTIPLICATION:
            return input_features * spread
        return input_features + spread


class MinkowskiBroadcastBase(MinkowskiModuleBase):
    """forward(input, input_glob): SparseTensors of one manager.

    operation_type: a BroadcastMode; None for layers that copy.
    Raises: ContractError, FeatureShapeError, FeatureTypeError, CoordinateError.
    """

    operation_type = None

    @arguments_of_0_4("operation_type", also="dimension D")
    def __init__(self, operation_type=None):
        super().__init__()
        if operation_type is not None:
            self.operation_type = member("operation_type", operation_type, BroadcastMode)

    def forward(self, input, input_glob):
        for part in (input, input_glob):
            if not isinstance(part, SparseTensor):
                raise ContractError(f"{type(self).__name__} takes SparseTensors, got {kind_of(part, 'minkowski')}.")
        if input._manager is not input_glob._manager:
            raise ContractError("both tensors must share one coordinate manager.")
        out = self._join(input, input_glob)
        note("minkowski", type(self).__name__)
        return input._with(out)

    def _spread(self, input, input_glob):
        return broadcast(
            input._manager._manager, input_glob._F, input.coordinate_map_key.key, input_glob.coordinate_map_key.key
        )

    def _join(self, input, input_glob):
        return MinkowskiBroadcastFunction.compute(
            input._F,
            input_glob._F,
            self.operation_type,
            input.coordinate_map_key,
            input_glob.coordinate_map_key,
            input._manager,
        )

    def __repr__(self):
        return self.__class__.__name__ + "()"


class MinkowskiBroadcastAddition(MinkowskiBroadcastBase):
    """x + g of the row's batch item."""

    operation_type = BroadcastMode.ELEMENTWISE_ADDITON


class MinkowskiBroadcastMultiplication(MinkowskiBroadcastBase):
    """x * g of the row's batch item."""

    operation_type = BroadcastMode.ELEMENTWISE_MULTIPLICATION


class MinkowskiBroadcast(MinkowskiBroadcastBase):
    """g of the row's batch item."""

    def _join(self, input, input_glob):
        return self._spread(input, input_glob)


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """[x, g of the row's batch item] along the channels."""

    def _join(self, input, input_glob):
        return torch.cat([input._F, self._spread(input, input_glob)], 1)


# names of 0.4

AbstractMinkowskiBroadcast = MinkowskiBroadcastBase
op_to_int = {operation: int(operation) for operation in OperationType}


def operation_type_to_int(op):
    """The number of an OperationType. Raises: ContractError."""
    return op_to_int[checked("op", op, OperationType)]
