"""A hash table from integer keys to numbers."""

import torch
from cumm import tensorview as tv
from spconv.pytorch.cppcore import get_current_stream, torch_tensor_to_tv

from sparse_bridge.adapters.spconv.upstream.voxel_hash import HashTable

__all__ = ["HashTable", "get_current_stream", "torch", "torch_tensor_to_tv", "tv"]
