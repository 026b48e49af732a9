"""Cropping."""

from torch import nn
from torchsparse.nn import functional as F

__all__ = ["SparseCrop"]


class SparseCrop(nn.Module):
    """Keeps rows with coords_min <= first three columns < coords_max."""

    def __init__(self, coords_min=None, coords_max=None):
        super().__init__()
        self.coords_min = coords_min
        self.coords_max = coords_max

    def forward(self, input):
        return F.spcrop(input, self.coords_min, self.coords_max)
