"""Activations on the features."""

import torch
from torch import nn

from sparse_bridge import hooks
from sparse_bridge.adapters import training_norms
from sparse_bridge.adapters.inference import activated
from sparse_bridge.adapters.lazy_features import deferred_of
from sparse_bridge.adapters.torchsparse.tensors import feats_of, with_feats
from sparse_bridge.core.conv.epilogue import row_of

__all__ = ["LeakyReLU", "ReLU", "SiLU"]


class ReLU(nn.ReLU):
    """torch's, on a sparse tensor; inplace overwrites the input's features too."""

    def forward(self, input):
        if torch.is_grad_enabled():  # perhaps behind a norm in training
            return training_norms.rectify(self, super().forward, input)
        if hooks.torch_replaced():
            return with_feats(input, super().forward(feats_of(input, "ReLU")))
        alone = torch.relu_ if self.inplace else torch.relu
        conv = deferred_of(input)
        if conv is None:
            return with_feats(input, alone(feats_of(input, "ReLU")))
        return with_feats(input, activated(conv, ("relu", 0.0), self.inplace, alone, input))


class _Activation:
    def forward(self, input):
        conv, row, alone = deferred_of(input), row_of(self), super().forward
        if conv is None or row is None or hooks.torch_replaced():
            return with_feats(input, alone(feats_of(input, type(self).__name__)))
        return with_feats(input, activated(conv, (row.name, row.slope_of(self)), self.inplace, alone, input))


class LeakyReLU(_Activation, nn.LeakyReLU):
    """torch's, on a sparse tensor."""


class SiLU(_Activation, nn.SiLU):
    """torch's, on a sparse tensor."""
