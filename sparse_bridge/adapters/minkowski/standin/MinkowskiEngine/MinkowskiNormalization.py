"""Normalisation layers."""

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.MinkowskiTensor import Tensor, refuse_kind
from MinkowskiEngine.sparse_matrix_functions import ComposedFunction
from MinkowskiEngineBackend._C import CoordinateMapKey, GlobalPoolingMode, PoolingMode
from torch import nn

from sparse_bridge.adapters import training_norms
from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.minkowski import batches
from sparse_bridge.adapters.minkowski.norm import batch_norm, instance_norm
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import checked
from sparse_bridge.adapters.minkowski.upstream.keys import fill
from sparse_bridge.adapters.minkowski.weights import check_aligned
from sparse_bridge.core.traced import between_graphs

__all__ = [
    "MinkowskiBatchNorm",
    "MinkowskiInstanceNorm",
    "MinkowskiInstanceNormFunction",
    "MinkowskiStableInstanceNorm",
    "MinkowskiSyncBatchNorm",
]

_BATCH_NORM = "num_features eps momentum affine track_running_stats"


class MinkowskiBatchNorm(MinkowskiModuleBase):
    """torch's BatchNorm1d over all rows of all batch items, in child `bn`.

    Takes SparseTensors and TensorFields.
    """

    @arguments_of_0_4(_BATCH_NORM, also="dimension D")
    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True):
        super().__init__()
        self.bn = nn.BatchNorm1d(
            num_features, eps=eps, momentum=momentum, affine=affine, track_running_stats=track_running_stats
        )

    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        norm = self._modules["bn"]
        if norm.training and len(input._F):
            output = training_norms.normalise(norm, norm, input)
        else:
            output = input._with(batch_norm(norm, input))
        note("minkowski", type(self).__name__)
        return output

    def __repr__(self):
        bn = self.bn
        return (
            f"{self.__class__.__name__}({bn.num_features}, eps={bn.eps}, momentum={bn.momentum}, "
            f"affine={bn.affine}, track_running_stats={bn.track_running_stats})"
        )


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """`MinkowskiBatchNorm` with statistics over all processes; `bn` is torch's SyncBatchNorm."""

    @arguments_of_0_4(f"{_BATCH_NORM} process_group", also="dimension D")
    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, process_group=None):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.bn = nn.SyncBatchNorm(
            num_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            process_group=process_group,
        )

    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        out = self.bn(input._F)  # every process takes part, also with no rows
        note("minkowski", type(self).__name__)
        return input._with(out)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """The module with every MinkowskiBatchNorm replaced; parameters and buffers are shared."""
        converted = module
        if isinstance(module, MinkowskiBatchNorm) and not isinstance(module, cls):
            bn = module.bn
            converted = cls(bn.num_features, bn.eps, bn.momentum, bn.affine, bn.track_running_stats, process_group)
            if bn.affine:
                converted.bn.weight = bn.weight
                converted.bn.bias = bn.bias
            converted.bn.running_mean = bn.running_mean
            converted.bn.running_var = bn.running_var
            converted.bn.num_batches_tracked = bn.num_batches_tracked
            converted.training = module.training
            converted.bn.training = bn.training
            return converted
        for name, child in module.named_children():
            replacement = cls.convert_sync_batchnorm(child, process_group)
            if replacement is not child:
                module.add_module(name, replacement)
        return converted


def _normalized(features, registry, key, eps):
    check_aligned(features, registry.grid(key), "instance norm")
    glob = batches.origin(registry)
    items = batches.batch_rows(registry, key, glob)
    return instance_norm(features, items, registry.grid(glob).n_rows, eps), glob


class MinkowskiInstanceNormFunction(ComposedFunction):
    """apply(features, in_key, glob_key=None, manager=None, gpooling_mode=...).

    Or 0.4's arguments: features, mode, in_key, glob_key, manager.
    """

    @classmethod
    def apply(cls, *args, **kwargs):
        if len(args) > 1 and isinstance(args[1], GlobalPoolingMode):
            args = (args[0], *args[2:])
        return cls.compute(*args, **kwargs)

    @staticmethod
    def compute(
        in_feat,
        in_coords_key,
        glob_coords_key=None,
        coords_manager=None,
        gpooling_mode=PoolingMode.GLOBAL_AVG_POOLING_KERNEL,
    ):
        out, glob = _normalized(in_feat, coords_manager._manager, in_coords_key.key, 1e-8)
        fill(glob_coords_key if isinstance(glob_coords_key, CoordinateMapKey) else None, glob)
        return out


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """w * (x - mean) / sqrt(var + 1e-8) + b per batch item and channel; biased variance.

    `weight` [1, C], `bias` [1, C]. An item of one row gives the bias. 0.4's `mode`, how it computed
    means, is a GlobalPoolingMode and changes nothing.
    """

    eps = 1e-8

    @arguments_of_0_4("num_features mode", also="dimension D")
    def __init__(self, num_features, *, mode=GlobalPoolingMode.AUTO):
        super().__init__()
        self.num_features = num_features
        self.mode = checked("mode", mode, GlobalPoolingMode)
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.fill_(1)
            self.bias.zero_()

    @between_graphs
    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        registry = input._manager._manager
        if isinstance(input, SparseTensor):
            out, _ = _normalized(input._F, registry, input.coordinate_map_key.key, self.eps)
        else:
            glob = batches.origin(registry)
            items = batches.field_items(registry, input.coordinate_field_map_key.key, glob)
            out = instance_norm(input._F, items, registry.grid(glob).n_rows, self.eps)
        out = out * self.weight.to(out.dtype) + self.bias.to(out.dtype)
        note("minkowski", type(self).__name__)
        return input._with(out)

    def __repr__(self):
        return f"{self.__class__.__name__}(nchannels={self.num_features})"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """`MinkowskiInstanceNorm` with an epsilon of 1e-6, its attribute `eps`."""

    eps = 1e-6

    @arguments_of_0_4("num_features", also="dimension D")
    def __init__(self, num_features):
        super().__init__(num_features)

    def forward(self, x):
        return super().forward(x)
