"""BatchNorm in training and the ReLU behind it as one operation, for layers that take sparse
tensors.

A container that holds both can look ahead; layers that are called one by one cannot. So a norm
remembers whether a ReLU alone took its result before. If so, the next result is computed with the
ReLU, and the sparse tensor keeps it aside: the ReLU takes it, and whoever else reads the features
gets those of the norm alone, computed then. Running statistics move once, when the norm is called.

How a framework's classes use it:

    class SparseTensor(LazyFeatures):       # of `late`
    class BatchNorm(nn.BatchNorm1d):
        def forward(self, input):
            return training_norms.normalise(self, super().forward, input)
    class ReLU(nn.ReLU):
        def forward(self, input):
            return training_norms.rectify(self, super().forward, input)

and a layer that wraps torch's own as a child passes that child twice:
`normalise(self.bn, self.bn, input)`. Tensors that are no `LazyFeatures` (the installed framework's)
are normalised by the same kernels, the ReLU for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import hooks
from ..core.conv.epilogue import STEP_ACTIVATION
from ..core.conv.history import History, history_of
from ..core.device.torch_compat import SAVED_TENSORS_HOOKS
from ..core.ops.batch_norm import batch_norm
from ..errors import SparseInputError
from . import fusion, protocol
from .lazy_features import LazyFeatures, has_features, take


class _LateNorm:
    """What a norm in training makes of `x`: with the ReLU, until somebody asks for it without."""

    __slots__ = ("norm", "rectified", "version", "x")

    def __init__(self, norm: nn.BatchNorm1d, x: torch.Tensor, rectified: torch.Tensor) -> None:
        self.norm, self.x, self.version = norm, x, x._version
        self.rectified: torch.Tensor | None = rectified

    def materialize(self) -> torch.Tensor:
        """Without the ReLU. Statistics have been counted already."""
        if self.x._version != self.version:
            raise RuntimeError(
                "features were modified by an inplace operation between a BatchNorm in training "
                "and the first use of its result; copy them before."
            )
        history_of(self.norm).read("")
        parameters: dict[str, Any] = self.norm._parameters
        with torch.inference_mode(False), torch.enable_grad():
            vectors = parameters["weight"], parameters["bias"], None, None, None
            return batch_norm(self.x, vectors, momentum=0.0, eps=self.norm.eps)

    def take_rectified(self) -> torch.Tensor:
        """With the ReLU; a tensor of its own for everybody who asks."""
        rectified, self.rectified = self.rectified, None
        return hooks.TORCHS_RELU(self.materialize()) if rectified is None else rectified


def normalise(norm: nn.BatchNorm1d, run: Callable[..., torch.Tensor], x: Any) -> Any:
    """What a framework's BatchNorm returns for a sparse tensor.

    norm: holds parameters and statistics.  run: what computes on the features: the norm's own
    `nn.BatchNorm1d.forward`, or `norm` itself where it is a module of its own.
    """
    if hooks.traced():
        return _traced(x, lambda features: _traced_norm(norm, run, features))
    framework = protocol.of(x)
    features = None if framework is None else framework.features_of(x)
    if framework is None or features is None:
        raise protocol.missing_features(x, type(norm).__name__)
    if not (fusion.is_training_norm(norm, run) and fusion.training_fusible(features)):
        return framework.with_features(x, run(features))
    history = history_of(norm)
    rectified = history.seen == STEP_ACTIVATION and not history.disabled and _foreseen(features)
    y = fusion.batch_norm_training(norm, features, rectified)
    out = framework.with_features(x, y)
    if rectified:
        delattr(out, out.features_attribute)
        out._late = _LateNorm(norm, features, y)
    elif isinstance(out, LazyFeatures):
        out._late = history
    return out


def _traced_norm(norm: nn.BatchNorm1d, run: Callable[..., torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    from ..core.compile import norms

    return norms.normalised(norm, features, False) if norms.served(norm, features) else run(features)


def _traced(x: Any, run: Callable[..., torch.Tensor]) -> Any:
    """A sparse tensor with what `run` makes of its features, in a graph: compilers fuse that."""
    if isinstance(x, LazyFeatures):
        return x._with(run(getattr(x, x.features_attribute)))
    return _framework_of(x).with_features(x, run(_features(x)))


def _foreseen(features: torch.Tensor) -> bool:
    """Whether a result may be computed with what probably follows. Without gradients nobody else
    would mind a later change of the features; checkpoints count what is saved, call by call."""
    return (
        features.requires_grad
        and torch.is_grad_enabled()
        and SAVED_TENSORS_HOOKS is not None
        and SAVED_TENSORS_HOOKS(False) is None
    )


def rectify(relu: nn.ReLU, run: Callable[..., torch.Tensor], x: Any) -> Any:
    """What a framework's ReLU returns for a sparse tensor; arguments as of `normalise`."""
    if hooks.traced():
        return _traced(x, run)
    late = take(x, _LateNorm, History) if isinstance(x, LazyFeatures) else None
    if isinstance(late, _LateNorm) and not has_features(x):
        if fusion.runs_own(run, nn.ReLU, hooks.RELU_FORWARD):
            y = late.take_rectified()
            if relu.inplace:
                setattr(x, x.features_attribute, y)
            else:
                x._late = late
            return _framework_of(x).with_features(x, y)
        setattr(x, x.features_attribute, late.materialize())
    elif isinstance(late, History):
        late.seen = STEP_ACTIVATION
    return _framework_of(x).with_features(x, run(_features(x)))


def _framework_of(x: Any) -> protocol.TensorProtocol:
    framework = protocol.of(x)
    if framework is None:
        raise SparseInputError(f"expected a sparse tensor, got {type(x).__name__}.")
    return framework


def _features(x: Any) -> torch.Tensor:
    features = _framework_of(x).features_of(x)
    if features is None:
        raise protocol.missing_features(x, "the layer")
    return features


def left_out(module: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """features [0, C], which `module` does not see, but with zeros as gradients of its parameters:
    DDP waits for each parameter on every rank, also of a rank with an empty scene.

    Joint statistics are taken: the other ranks wait for this one's.
    """
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        output: torch.Tensor = module(features)
        return output
    if torch.is_grad_enabled():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.numel():
                features = features + parameter.flatten()[0]
    return features
