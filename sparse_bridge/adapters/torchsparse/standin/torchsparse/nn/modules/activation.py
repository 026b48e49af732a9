"""Activations on the features."""

import torch
from torch import nn
from torch.nn import functional as F

from sparse_bridge.adapters import training_norms
from sparse_bridge.adapters.inference import activated
from sparse_bridge.adapters.lazy_features import pending_of
from sparse_bridge.adapters.torchsparse.tensors import with_feats

__all__ = ["LeakyReLU", "ReLU", "SiLU"]


class ReLU(nn.ReLU):
    """torch's, on a sparse tensor; inplace overwrites the input's features too."""

    def forward(self, input):
        if torch.is_grad_enabled():  # perhaps behind a norm in training
            return training_norms.rectify(self, super().forward, input)
        alone = torch.relu_ if self.inplace else torch.relu
        conv = pending_of(input)
        if conv is None:
            return with_feats(input, alone(input.feats))
        return with_feats(input, activated(conv, ("relu", 0.0), self.inplace, alone, input))


class LeakyReLU(nn.LeakyReLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        slope, inplace = self.negative_slope, self.inplace

        def alone(feats):
            return F.leaky_relu(feats, slope, inplace)

        conv = pending_of(input)
        if conv is None:
            return with_feats(input, alone(input.feats))
        return with_feats(input, activated(conv, ("leaky_relu", slope), inplace, alone, input))


class SiLU(nn.SiLU):
    """torch's, on a sparse tensor."""

    def forward(self, input):
        return with_feats(input, F.silu(input.feats, self.inplace))
