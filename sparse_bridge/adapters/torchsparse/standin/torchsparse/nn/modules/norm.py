"""Norms on the features."""

from torch import nn
from torchsparse.nn.utils.apply import fapply

from sparse_bridge.adapters import inference, training_norms
from sparse_bridge.adapters.torchsparse.operations import norm
from sparse_bridge.adapters.torchsparse.tensors import with_feats

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm"]


class BatchNorm(nn.BatchNorm1d):
    """torch's BatchNorm1d over all rows."""

    _counts_rows = True  # in training, where a capture says how many are in use

    def forward(self, input):
        if self.training:
            return training_norms.normalise(self, super().forward, input)
        return with_feats(input, inference.normed(self, super().forward, input))


class GroupNorm(nn.GroupNorm):
    """Statistics of every batch item on its own."""

    def forward(self, input):
        return norm.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class InstanceNorm(nn.InstanceNorm1d):
    """As in torchsparse, every row is normalised across its channels.

    per_batch=True, which the original lacks, normalises each channel over the rows of a batch item.
    """

    def __init__(self, *args, per_batch=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.per_batch = per_batch

    def forward(self, input):
        if self.per_batch:
            return norm.instance_norm(input, self.weight, self.bias, self.eps)
        return fapply(input, super().forward)
