"""Points to voxels."""

from sparse_bridge.adapters.torchsparse.points import spvoxelize

__all__ = ["spvoxelize"]
