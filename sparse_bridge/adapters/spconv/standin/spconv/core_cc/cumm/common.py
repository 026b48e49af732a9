"""What was compiled: nothing; kernels are compiled when they are first used."""

from sparse_bridge.adapters.spconv.upstream.extension import CompileInfo as CompileInfo
