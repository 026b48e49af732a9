"""Whether anybody watches torch modules, or wants them eager: hooks, replaced forwards, tracing, the program's word.

Layers are fused or replayed only where nobody could notice; these are the questions to ask before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary

# The attribute of whatever this package puts in the place of a module's forward: the forward of its
# class that it computes.
IN_PLACE_OF = "in_place_of"

# Functions of torch that fused layers stand for, as they are when this is imported.
TORCHS_BATCH_NORM, TORCHS_RELU, TORCHS_RELU_ = torch.batch_norm, torch.relu, torch.relu_
TORCHS_SIGMOID, TORCHS_SIGMOID_ = torch.sigmoid, torch.sigmoid_
BATCH_NORM, _RELU, _LEAKY_RELU, _SIGMOID = F.batch_norm, F.relu, F.leaky_relu, F.sigmoid
TORCHS_ADD_ = torch.Tensor.add_
NORM_FORWARD, RELU_FORWARD = nn.BatchNorm1d.forward, nn.ReLU.forward
_LEAKY_FORWARD, _SIGMOID_FORWARD = nn.LeakyReLU.forward, nn.Sigmoid.forward
_CHECK_INPUT = nn.BatchNorm1d._check_input_dim
# Where those are looked up, under names of one step each.
_NN, _Module, _Norm = torch._C._nn, nn.Module, nn.BatchNorm1d
_ReLU, _LeakyReLU, _Sigmoid = nn.ReLU, nn.LeakyReLU, nn.Sigmoid
TORCHS_LEAKY_RELU, TORCHS_LEAKY_RELU_ = _NN.leaky_relu, _NN.leaky_relu_
_CALL = nn.Module.__call__  # subclasses may have another one, and programs may put another one there
_CALL_IMPL = nn.Module._call_impl
_local = threading.local()
_eager_modules: WeakIdKeyDictionary = WeakIdKeyDictionary()  # models may be equal to others


def inference() -> bool:
    """Whether inference may be fused now: no gradients, no tracing, no hooks on every module."""
    return not (
        traced()
        or torch.is_grad_enabled()
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def compiled_inference() -> bool:
    """`inference` in a graph that `torch.compile` makes."""
    return torch.compiler.is_compiling() and not (
        torch.is_grad_enabled() or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    )


def torch_replaced() -> bool:
    """Whether the program has put something else in the place of a function of torch that fused layers stand for.
    (Written out, as it is asked at every layer.)"""
    return not (
        F.batch_norm is BATCH_NORM
        and F.relu is _RELU
        and F.leaky_relu is _LEAKY_RELU
        and F.sigmoid is _SIGMOID
        and _NN.leaky_relu is TORCHS_LEAKY_RELU
        and _NN.leaky_relu_ is TORCHS_LEAKY_RELU_
        and torch.batch_norm is TORCHS_BATCH_NORM
        and torch.relu is TORCHS_RELU
        and torch.relu_ is TORCHS_RELU_
        and torch.sigmoid is TORCHS_SIGMOID
        and _Norm.forward is NORM_FORWARD
        and _ReLU.forward is RELU_FORWARD
        and _LeakyReLU.forward is _LEAKY_FORWARD
        and _Sigmoid.forward is _SIGMOID_FORWARD
        and _Norm._check_input_dim is _CHECK_INPUT
        and _Module.__call__ is _CALL
        and _Module._call_impl is _CALL_IMPL
        and not REPLACED_BEFORE
    )


def _made_by_torch(function: Any) -> bool:
    """Whether a function is of C, or of one of torch's modules, whatever name it goes by."""
    if isinstance(function, types.BuiltinFunctionType):
        return True
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("torch.")


# Whether a program did so before this was imported. Whether it has been undone nobody can tell.
REPLACED_BEFORE = not all(
    map(
        _made_by_torch,
        (TORCHS_BATCH_NORM, TORCHS_RELU, TORCHS_RELU_, TORCHS_SIGMOID, TORCHS_SIGMOID_)
        + (BATCH_NORM, _RELU, _LEAKY_RELU, _SIGMOID, TORCHS_LEAKY_RELU, TORCHS_LEAKY_RELU_)
        + (NORM_FORWARD, RELU_FORWARD, _LEAKY_FORWARD, _SIGMOID_FORWARD)
        + (_CHECK_INPUT, _CALL, _CALL_IMPL),
    )
)


def traced() -> bool:
    """Whether torch records what Python does: `torch.jit.trace`, `torch.compile`."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def plain(module: nn.Module) -> bool:
    """Whether a call of this module is its class's forward, which nothing watches or replaces."""
    own_call = type(module).__call__ is _CALL
    return own_call and not (module._forward_hooks or module._forward_pre_hooks or replaced(module))


def replaced(module: nn.Module) -> bool:
    """Whether an object's forward is another one than its class's."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return "forward" in module.__dict__
    if type(forward) is types.MethodType:
        own = getattr(forward.__func__, IN_PLACE_OF, forward.__func__)
        return own is not type(module).forward or forward.__self__ is not module
    return True


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to this module, or to its gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hooked_everywhere() -> bool:
    """Whether somebody listens to every module, or to its gradients."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def unseen(module: nn.Module) -> bool:
    """Nobody replaces this module's forward, or listens to it, its gradients or every module. (One
    function: inference asks for it at every layer.)"""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or ("forward" in module.__dict__ and replaced(module))
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def parameters_of(layer: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The parameter of that name and the bias, as the layer's attributes give them. (Its dictionary is
    read five times faster; it does not have what is computed, or what a property puts before it.)"""
    parameters: dict[str, Any] = layer._parameters
    kind = type(layer)
    if name in parameters and "bias" in parameters and not (hasattr(kind, name) or hasattr(kind, "bias")):
        return parameters[name], parameters["bias"]
    return getattr(layer, name), layer.bias  # type: ignore[return-value]


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """In this block the calling thread replays nothing from captured graphs: every layer runs."""
    outer = getattr(_local, "eager", False)
    _local.eager = True
    try:
        yield
    finally:
        _local.eager = outer


def forbid_replays(model: nn.Module) -> None:
    """Never replay this model or a part of it."""
    for module in model.modules():
        _eager_modules[module] = True


def permit_replays(model: nn.Module) -> None:
    """Undo `forbid_replays`."""
    for module in model.modules():
        _eager_modules.pop(module, None)


def may_be_replayed(model: nn.Module) -> bool:
    """Whether a call of this model may be replayed now, as far as the program has said."""
    return not getattr(_local, "eager", False) and model not in _eager_modules


class ModelReference:
    """A model as long as the program has it, and the forward of its class. What belongs to a model does not keep it:
    a program that drops its model gets all memory back at once."""

    def __init__(self, model: nn.Module) -> None:
        own, exits = weakref.ref(self), sys.is_finalizing  # when Python exits, this module's names are gone first

        def dropped(_: Any) -> None:
            if (reference := own()) is not None and not exits():
                reference.gone()

        self._model = weakref.ref(model, dropped)

    def gone(self) -> None:
        """The program has dropped the model."""

    def refers_to(self, model: nn.Module) -> bool:
        """Whether this is the model."""
        return self._model() is model

    @property
    def model(self) -> nn.Module:
        """The model. Raises ReferenceError where it is gone."""
        model = self._model()
        if model is None:
            raise ReferenceError("a model was called that its program has dropped")
        return model

    def run_layers(self, *args: Any, **kwargs: Any) -> Any:
        """What its class computes."""
        model = self.model
        return type(model).forward(model, *args, **kwargs)
