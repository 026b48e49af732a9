"""Use `spconv.pytorch.hash.HashTable`, which works on torch tensors."""

from sparse_bridge.adapters.spconv.upstream.missing import missing_class

HashTable = missing_class(__name__, "HashTable", "use spconv.pytorch.hash.HashTable")
