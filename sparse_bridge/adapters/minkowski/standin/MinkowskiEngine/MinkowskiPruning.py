"""Dropping rows."""

from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import CoordinateMapKey

from sparse_bridge.adapters.ledger import note
from sparse_bridge.adapters.minkowski.arguments import drop_old
from sparse_bridge.adapters.minkowski.rows import prune
from sparse_bridge.errors import ContractError

__all__ = ["MinkowskiPruning", "MinkowskiPruningFunction"]


class MinkowskiPruningFunction(ComposedFunction):
    """apply(features, mask, in_key, out_key, manager); fills in an unset `out_key`."""

    @staticmethod
    def compute(in_feat, mask, in_coords_key, out_coords_key=None, coords_manager=None):
        known = out_coords_key is not None and out_coords_key.is_key_set()
        given = out_coords_key.key if known else None
        out, key = prune(coords_manager._manager, in_feat, mask, in_coords_key.key, given)
        if out_coords_key is not None and not known:
            out_coords_key.set_key(*key)
        return out


class MinkowskiPruning(MinkowskiModuleBase):
    """Keeps the rows of a SparseTensor where a bool mask [N] is set, in order.

    The result may be empty. Its map is a new one of the same tensor stride.
    Raises: ContractError, FeatureShapeError, TensorDeviceError (the last two RuntimeErrors).
    """

    def __init__(self, **old):
        super().__init__()
        drop_old(type(self).__name__, old)

    def forward(self, input, mask):
        if not isinstance(input, SparseTensor):
            raise ContractError(
                f"MinkowskiPruning takes a SparseTensor, got {type(input).__name__}."
            )
        out, key = prune(input._manager._manager, input.F, mask, input.coordinate_map_key.key)
        note("minkowski", type(self).__name__)
        return SparseTensor(
            out, coordinate_map_key=CoordinateMapKey.of(key), coordinate_manager=input._manager
        )

    def __repr__(self):
        return self.__class__.__name__ + "()"
