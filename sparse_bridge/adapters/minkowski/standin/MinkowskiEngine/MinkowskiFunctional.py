"""torch.nn.functional on the features of SparseTensors and TensorFields."""

from MinkowskiEngine.MinkowskiTensor import Tensor as _Tensor
from torch.nn import functional as _F

from sparse_bridge.adapters.convert import kind_of as _kind_of
from sparse_bridge.errors import ContractError as _ContractError

_FEATURE_WISE = (
    "threshold",
    "relu",
    "hardtanh",
    "hardswish",
    "relu6",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "prelu",
    "rrelu",
    "glu",
    "gelu",
    "logsigmoid",
    "hardshrink",
    "tanhshrink",
    "softsign",
    "softplus",
    "softmin",
    "softmax",
    "softshrink",
    "gumbel_softmax",
    "log_softmax",
    "tanh",
    "sigmoid",
    "hardsigmoid",
    "silu",
    "batch_norm",
    "normalize",
    "linear",
    "dropout",
    "alpha_dropout",
)
_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "poisson_nll_loss",
    "cross_entropy",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
_TENSOR_METHODS = ("tanh", "sigmoid")  # deprecated in torch.nn.functional


def _check_kind(name, input):
    if not isinstance(input, _Tensor):
        raise _ContractError(
            f"MinkowskiFunctional.{name} takes a SparseTensor or TensorField, got {_kind_of(input, 'minkowski')}; "
            f"torch.nn.functional.{name} takes tensors."
        )


def _feature_wise(name):
    function = getattr(_F, name)

    def wrapper(input, *args, **kwargs):
        _check_kind(name, input)
        if name in _TENSOR_METHODS:
            return input._with(getattr(input.F, name)(*args, **kwargs))
        return input._with(function(input.F, *args, **kwargs))

    return _named(wrapper, name, f"torch.nn.functional.{name} on the features; the same kind back.")


def _loss(name):
    function = getattr(_F, name)

    def wrapper(input, target, *args, **kwargs):
        _check_kind(name, input)
        return function(input.F, target, *args, **kwargs)

    return _named(wrapper, name, f"torch.nn.functional.{name} of the features and a torch target.")


def _named(function, name, text):
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


for _name in _FEATURE_WISE:
    globals()[_name] = _feature_wise(_name)
for _name in _LOSSES:
    globals()[_name] = _loss(_name)

__all__ = [*_FEATURE_WISE, *_LOSSES]
