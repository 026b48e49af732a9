"""Dropping rows."""

from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.minkowski.rows import prune
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.keys import fill, given_by
from sparse_bridge.errors import ContractError

__all__ = ["MinkowskiPruning", "MinkowskiPruningFunction"]


class MinkowskiPruningFunction(ComposedFunction):
    """apply(features, mask, in_key, out_key, manager); fills in an unset `out_key`."""

    @staticmethod
    def compute(in_feat, mask, in_coords_key, out_coords_key=None, coords_manager=None):
        target = given_by(out_coords_key)
        out, key = prune(coords_manager._manager, in_feat, mask, in_coords_key.key, target)
        fill(out_coords_key, key)
        return out


class MinkowskiPruning(MinkowskiModuleBase):
    """Keeps the rows of a SparseTensor where a bool mask [N] is set, in order.

    The result may be empty. Its map is a new one of the same tensor stride.
    Raises: ContractError, FeatureShapeError, TensorDeviceError (the last two RuntimeErrors).
    """

    @arguments_of_0_4("", also="dimension D")
    def __init__(self):
        super().__init__()

    def forward(self, input, mask):
        if not isinstance(input, SparseTensor):
            raise ContractError(f"MinkowskiPruning takes a SparseTensor, got {kind_of(input, 'minkowski')}.")
        out, key = prune(input._manager._manager, input._F, mask, input.coordinate_map_key.key)
        note("minkowski", type(self).__name__)
        return SparseTensor._of(out, key, input._manager)

    def __repr__(self):
        return self.__class__.__name__ + "()"
