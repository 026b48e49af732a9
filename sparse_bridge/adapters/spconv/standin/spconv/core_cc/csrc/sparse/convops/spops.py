"""Products over kernel maps."""

from sparse_bridge.adapters.spconv.upstream.extension import ConvGemmOps as ConvGemmOps
