"""Where 0.4 kept `SparseTensor` and what belongs to it."""

from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, _get_coordinate_map_key
from MinkowskiEngine.MinkowskiTensor import COORDINATE_KEY_DIFFERENT_ERROR as COORDS_KEY_DIFFERENT_ERROR
from MinkowskiEngine.MinkowskiTensor import COORDINATE_MANAGER_DIFFERENT_ERROR as COORDS_MAN_DIFFERENT_ERROR
from MinkowskiEngine.MinkowskiTensor import (
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    set_sparse_tensor_operation_mode,
    sparse_tensor_operation_mode,
)
from MinkowskiEngine.MinkowskiTensor import clear_global_coordinate_manager as clear_global_coords_man
from MinkowskiEngine.MinkowskiTensor import global_coordinate_manager as global_coords_man
from MinkowskiEngine.MinkowskiTensor import set_global_coordinate_manager as set_global_coords_man

__all__ = [
    "COORDS_KEY_DIFFERENT_ERROR",
    "COORDS_MAN_DIFFERENT_ERROR",
    "SparseTensor",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "_get_coords_key",
    "clear_global_coords_man",
    "global_coords_man",
    "set_global_coords_man",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]

_get_coords_key = _get_coordinate_map_key
