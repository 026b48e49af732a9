"""The box operations work in `spconv.utils`, on numpy arrays."""

from sparse_bridge.adapters.spconv.upstream.missing import missing_class

BoxOps = missing_class(__name__, "BoxOps", "use the functions of spconv.utils")
