"""Abstract base of networks."""

from abc import ABC, abstractmethod

from torch import nn

__all__ = ["MinkowskiNetwork"]


class MinkowskiNetwork(nn.Module, ABC):
    """A network for D spatial axes; `D` is all that it adds."""

    def __init__(self, D):
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x):
        """To be written by the network."""
