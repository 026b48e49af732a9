"""A hash table from integer keys to numbers."""

from sparse_bridge.adapters.spconv.voxel_hash import HashTable

__all__ = ["HashTable"]
