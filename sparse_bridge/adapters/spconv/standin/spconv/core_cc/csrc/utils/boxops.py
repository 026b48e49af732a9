"""Box operations on tv.Tensors; `spconv.utils` has them on numpy arrays."""

from sparse_bridge.adapters.spconv.upstream.boxes import BoxOps as BoxOps
