"""Interpolation of sparse tensors at float positions."""

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, refuse_input
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.minkowski.errors import FeatureTypeError
from sparse_bridge.adapters.minkowski.points import interpolation_matrix
from sparse_bridge.core.arguments import expect_tensors
from sparse_bridge.core.traced import between_graphs

__all__ = ["MinkowskiInterpolation", "MinkowskiInterpolationFunction"]


@between_graphs
def interpolate_at(x, query):
    """(features [M, C] at positions [M, D + 1], the interpolation matrix)."""
    matrix = interpolation_matrix(x._manager._manager.grid(x.coordinate_map_key.key), query)
    return matrix.multiply(x._F), matrix


def check_query(features, query):
    """Raise the FeatureTypeError for positions of a dtype that does not fit the features."""
    expect_tensors("MinkowskiInterpolation", positions=query)
    if not query.is_floating_point():
        raise FeatureTypeError(f"positions are {query.dtype}; expected floating point.")
    if query.dtype != features.dtype and features.dtype.itemsize > 2:
        raise FeatureTypeError(f"positions are {query.dtype}, features {features.dtype}; expected one dtype.")


class MinkowskiInterpolationFunction(ComposedFunction):
    """apply(features, query, in_key, coordinate_manager) -> (out, in_map, out_map, weights)."""

    @staticmethod
    def compute(features, query, in_coordinate_map_key, coordinate_manager=None):
        check_query(features, query)
        grid = coordinate_manager._manager.grid(in_coordinate_map_key.key)
        matrix = interpolation_matrix(grid, query)
        out = matrix.multiply(features)
        weights = matrix.weights.to(query.dtype)
        return out, matrix.in_rows.int(), matrix.out_rows.int(), weights


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Multilinear interpolation at float positions [M, D + 1], absolute, batch index first.

    Returns the features [M, C], or a tuple with (in_map, out_map) and weights as asked for.
    Absent voxels count as 0. Raises: FeatureTypeError, CoordinateError.
    """

    def __init__(self, return_kernel_map=False, return_weights=False):
        super().__init__()
        self.return_kernel_map = return_kernel_map
        self.return_weights = return_weights

    def forward(self, input, tfield):
        if not isinstance(input, SparseTensor):
            refuse_input(self, input)
        if torch.compiler.is_compiling():
            return self._traced(input, tfield)
        out, in_map, out_map, weights = MinkowskiInterpolationFunction.apply(
            input.F, tfield, input.coordinate_map_key, input._manager
        )
        note("minkowski", type(self).__name__)
        returned = [out]
        if self.return_kernel_map:
            returned.append((in_map, out_map))
        if self.return_weights:
            returned.append(weights)
        return tuple(returned) if len(returned) > 1 else out

    def _traced(self, input, tfield):
        """In a graph, unless it returns the map; that, between two graphs."""
        from sparse_bridge.adapters.minkowski import compiled

        registry, key = input._manager._manager, input.coordinate_map_key._key
        if self.return_kernel_map or self.return_weights or compiled.traced_sites(registry, key) is None:
            return compiled.outside(MinkowskiInterpolation.forward, self, input, tfield)
        check_query(input.F, tfield)
        return compiled.interpolated(registry, input.F, tfield, key)

    def __repr__(self):
        return self.__class__.__name__ + "()"
