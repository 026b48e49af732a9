"""Activations on the features."""

import torch
from torch import nn
from torch.nn import functional as F

from sparse_bridge.adapters import training_norms
from sparse_bridge.adapters.torchsparse.tensors import with_feats

__all__ = ["LeakyReLU", "ReLU", "SiLU"]


class ReLU(nn.ReLU):
    """torch's, on a sparse tensor; inplace overwrites the input's features too."""

    def forward(self, input):
        if torch.is_grad_enabled():  # perhaps behind a norm in training
            return training_norms.rectify(self, super().forward, input)
        return with_feats(input, F.relu(input.feats, self.inplace))


class LeakyReLU(nn.LeakyReLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        return with_feats(input, F.leaky_relu(input.feats, self.negative_slope, self.inplace))


class SiLU(nn.SiLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        return with_feats(input, F.silu(input.feats, self.inplace))
