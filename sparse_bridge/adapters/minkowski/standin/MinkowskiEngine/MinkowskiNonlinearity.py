"""torch's activations on features, each in a child `module`."""

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase as _ModuleBase
from MinkowskiEngine.MinkowskiTensor import Tensor, refuse_kind
from torch import nn

from sparse_bridge.adapters import fusion, inference, training_norms
from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.lazy_features import deferred_of
from sparse_bridge.adapters.minkowski import profile

_NAMES = (
    "ELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardtanh",
    "Hardswish",
    "LeakyReLU",
    "LogSigmoid",
    "PReLU",
    "ReLU",
    "ReLU6",
    "RReLU",
    "SELU",
    "CELU",
    "GELU",
    "Sigmoid",
    "SiLU",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "Softmin",
    "Softmax",
    "LogSoftmax",
    "AdaptiveLogSoftmaxWithLoss",
    "Dropout",
    "AlphaDropout",
)


class MinkowskiNonlinearityBase(_ModuleBase):
    """Applies `MODULE(*args, **kwargs)` to the features of a SparseTensor or TensorField."""

    MODULE = None

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        activation = self._modules["module"]
        if torch.is_grad_enabled() and isinstance(activation, nn.ReLU):
            output = training_norms.rectify(activation, activation, input)
        else:
            conv = None if input._late is None else deferred_of(input)
            fused = None if conv is None else fusion.own_activation(activation)
            if fused is None:
                output = input._with(activation(input._F))
            else:
                inplace = getattr(activation, "inplace", False)
                output = input._with(inference.activated(conv, fused, inplace, activation, input))
        note("minkowski", type(self).__name__)
        return output

    def __repr__(self):
        return self.__class__.__name__ + "()"


def _define(name):
    text = f"torch.nn.{name} on the features."
    body = {"MODULE": getattr(nn, name), "__doc__": text, "__module__": __name__}
    return type(f"Minkowski{name}", (MinkowskiNonlinearityBase,), body)


for _name in _NAMES:
    globals()[f"Minkowski{_name}"] = _define(_name)


class MinkowskiSinusoidal(_ModuleBase):
    """sin(x @ kernel + bias) * coef: `kernel` [in, out], `bias` and `coef` [1, out], U(0, 1)."""

    def __init__(self, in_channel, out_channel):
        super().__init__()
        self.in_channel = in_channel
        self.out_channel = out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias = nn.Parameter(torch.rand(1, out_channel))
        self.coef = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        out = torch.sin(input.F.mm(self.kernel) + self.bias) * self.coef
        note("minkowski", type(self).__name__)
        return input._with(out)

    def __repr__(self):
        return f"{self.__class__.__name__}({self.in_channel}, {self.out_channel})"


__all__ = ["MinkowskiNonlinearityBase", "MinkowskiSinusoidal"]
__all__ += [f"Minkowski{name}" for name in _NAMES]


def __getattr__(name):
    """`MinkowskiModuleBase`: in 0.4 the base of this module's layers, in 0.5 that of all layers."""
    if name == "MinkowskiModuleBase":
        return MinkowskiNonlinearityBase if profile.seems_old() else _ModuleBase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
