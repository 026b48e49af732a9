"""Sums over the union of coordinates."""

from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.minkowski.rows import union
from sparse_bridge.adapters.minkowski.upstream.keys import fill, given_by
from sparse_bridge.errors import ContractError

__all__ = ["MinkowskiUnion", "MinkowskiUnionFunction"]


class MinkowskiUnionFunction(ComposedFunction):
    """apply(in_keys, out_key, manager, *features); fills in an unset `out_key`."""

    @staticmethod
    def compute(in_coords_keys, out_coords_key, coordinate_manager, *in_feats):
        keys = [key.key for key in in_coords_keys]
        out, key = union(coordinate_manager._manager, in_feats, keys, given_by(out_coords_key))
        fill(out_coords_key, key)
        return out


class MinkowskiUnion(MinkowskiModuleBase):
    """forward(a, b, ..): at every coordinate of any input the sum of the inputs that have it.

    Raises: ContractError (fewer than two tensors, other types, different managers),
        FeatureShapeError.
    """

    def forward(self, *inputs):
        if len(inputs) < 2:
            raise ContractError(f"MinkowskiUnion takes two or more tensors, got {len(inputs)}.")
        for part in inputs:
            if not isinstance(part, SparseTensor):
                raise ContractError(f"MinkowskiUnion takes SparseTensors, got {kind_of(part, 'minkowski')}.")
            if part._manager is not inputs[0]._manager:
                raise ContractError("all tensors must share one coordinate manager.")
        manager = inputs[0]._manager
        keys = [part.coordinate_map_key.key for part in inputs]
        out, key = union(manager._manager, [part._F for part in inputs], keys)
        note("minkowski", type(self).__name__)
        return SparseTensor._of(out, key, manager)

    def __repr__(self):
        return self.__class__.__name__ + "()"
