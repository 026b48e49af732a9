"""Activation checkpointing of modules over sparse tensors: `torch.utils.checkpoint`, with maps that
are built once and norms that count a pass once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint as of_torch

from .core.maps.request import keeping
from .errors import DataTypeError, require_type

Module = TypeVar("Module", bound=nn.Module)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def checkpoint(module: Module) -> Module:
    """Have `module` keep no activations for the backward pass, but compute them again there.

    for level in model.levels:
        sparse_bridge.checkpoint(level)

    Arguments and results may be sparse tensors of any framework. Gradients have the same bits, maps
    are built once, running statistics of norms move once, and random numbers repeat. Its parameters
    keep their names; a copy of it is checkpointed, too. Twice is once.

    Returns: the module.
    Raises: DataTypeError for what is no module, and for lists of modules.
    """
    require_type("checkpoint()", module, nn.Module, "a torch.nn.Module, such as a level of a network")
    own = module.__dict__.get("forward")
    if own is None and type(module).forward is nn.Module.forward:
        raise DataTypeError(
            f"checkpoint got a {type(module).__name__}, which is never called itself; checkpoint the modules in it."
        )
    if not (isinstance(own, functools.partial) and own.func is _forward):
        module.forward = functools.partial(_forward, module, own)
    return module


def _forward(module: nn.Module, own: Callable[..., Any] | None, *args: Any, **named: Any) -> Any:
    """own: what `forward` was on the object before; None: it is the class's."""
    run = functools.partial(type(module).forward, module) if own is None else own
    if not torch.is_grad_enabled():
        return run(*args, **named)
    if torch.compiler.is_compiling():  # which keeps what it likes of two passes
        return of_torch(run, *args, use_reentrant=False, **named)
    passes = functools.partial(_passes, module)
    return of_torch(run, *args, use_reentrant=False, context_fn=passes, **named)


def _passes(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first pass, and around the second; this one holds the maps until then."""
    outputs: list[Any] = []
    return keeping(outputs), _SecondPass(module, outputs)


class _SecondPass:
    """Around a second pass, of which there may be several: norms move copies of their
    statistics."""

    def __init__(self, module: nn.Module, outputs: list[Any]) -> None:
        self._module, self._outputs = module, outputs
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for norm in self._module.modules():
            if isinstance(norm, _BatchNorm):
                stack.callback(norm._buffers.update, dict(norm._buffers))
                for name in _BUFFERS:
                    buffer = norm._buffers.get(name)
                    norm._buffers[name] = None if buffer is None else buffer.clone()
        stack.enter_context(keeping(self._outputs))
        self._open.append(stack)

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()
