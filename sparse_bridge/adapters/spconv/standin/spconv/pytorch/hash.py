"""A hash table from integer keys to numbers."""

from sparse_bridge.adapters.spconv.upstream.voxel_hash import HashTable

__all__ = ["HashTable"]
