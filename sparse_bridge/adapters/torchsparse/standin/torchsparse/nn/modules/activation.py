"""Activations on the features."""

from torch import nn
from torchsparse.nn.utils.apply import fapply

from sparse_bridge.adapters import training_norms

__all__ = ["LeakyReLU", "ReLU", "SiLU"]


class ReLU(nn.ReLU):
    """torch's, on a sparse tensor; inplace overwrites the input's features too."""

    def forward(self, input):
        return training_norms.rectify(self, super().forward, input)


class LeakyReLU(nn.LeakyReLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        return fapply(input, super().forward)


class SiLU(nn.SiLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        return fapply(input, super().forward)
