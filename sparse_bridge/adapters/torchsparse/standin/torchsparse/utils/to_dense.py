"""Dense grids."""

from torch.autograd import Function

from sparse_bridge.adapters.torchsparse.operations.dense import to_dense

__all__ = ["ToDenseFunction", "to_dense"]


class ToDenseFunction(Function):
    """`to_dense` by the name of the original's autograd function."""

    @staticmethod
    def apply(feats, coords, spatial_range):
        return to_dense(feats, coords, spatial_range)
