"""Helpers for data loading, initialisation and inspection."""

from MinkowskiEngine.utils import coords, gradcheck
from MinkowskiEngine.utils.collation import SparseCollation, batch_sparse_collate, batched_coordinates, sparse_collate
from MinkowskiEngine.utils.coords import get_coords_map
from MinkowskiEngine.utils.init import kaiming_normal_
from MinkowskiEngine.utils.quantization import fnv_hash_vec, ravel_hash_vec, sparse_quantize, unique_coordinate_map
from MinkowskiEngine.utils.summary import summary

__all__ = [
    "SparseCollation",
    "batch_sparse_collate",
    "batched_coordinates",
    "coords",
    "fnv_hash_vec",
    "get_coords_map",
    "gradcheck",
    "kaiming_normal_",
    "ravel_hash_vec",
    "sparse_collate",
    "sparse_quantize",
    "summary",
    "unique_coordinate_map",
]
