"""Points to voxels."""

from sparse_bridge.adapters.torchsparse.upstream.points import spvoxelize

__all__ = ["spvoxelize"]
