"""Outputs of a model from which it computes others, and who looks at their gradients.

A replay has all outputs from one node of autograd: such an output has the gradient that the program gives it, without
the part that comes through the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...refusals import Why
from ..device.torch_compat import executes_node
from .calls.autograd_nodes import autograd_nodes
from .model_graphs import ModelGraphs


class InnerOutputs:
    """Of a model that a graph was captured of: whether the program looks at such gradients."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        """leaves: of the output, as they were captured."""
        self.inner, self.seen = _inner(leaves), False

    def watch_layers(self, leaves_of: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Learn it from the step that was captured. leaves_of: of the output that the layers have returned."""

        def saw() -> None:
            self.seen = True

        if any(self.inner):
            leaves = leaves_of()
            for leaf in itertools.compress(leaves, _inner(leaves)):
                _watch(leaf, saw)

    def looked_into(self, owner: ModelGraphs) -> bool:
        """Whether it does. Then the model is replayed no more."""
        if self.seen:
            owner.drop(Why.GRAPH_INNER_GRADIENT.says())
        return self.seen

    def watch_replay(self, leaves: Sequence[torch.Tensor]) -> None:
        """Have the backward pass raise RuntimeError where it does so later."""
        for leaf in itertools.compress(leaves, self.inner):
            _watch(leaf, _refuse)


def _refuse() -> None:
    raise RuntimeError(
        "the gradient of an output of a replayed model that other outputs are computed from is not known; call the "
        "model in `with sparse_bridge.eager():` to have it."
    )


def _inner(leaves: Sequence[torch.Tensor]) -> list[bool]:
    """By leaf of an output, whether another one is computed from it."""
    behind = [autograd_nodes(leaf) - {leaf.grad_fn} for leaf in leaves]
    return [any(leaf.grad_fn in nodes for nodes in behind) for leaf in leaves]


def _watch(leaf: torch.Tensor, looked_at: Callable[[], None]) -> None:
    """Have `looked_at` called in a backward pass that the program sees the gradient of `leaf` in: by a hook,
    `retain_grad` or `torch.autograd.grad`. Before its own hooks: it has given none so far."""
    reference = weakref.ref(leaf)  # what autograd keeps of a step must not keep the step

    def look(_: torch.Tensor) -> None:
        tensor, all_hooks = reference(), hooks()
        seen = all_hooks is not None and len(all_hooks) > 1
        if tensor is not None and tensor.grad_fn is not None:
            ahead = [node for node, _ in tensor.grad_fn.next_functions if node is not None]
            seen = seen or tensor.retains_grad or not any(map(_goes_on, ahead))
        if seen:
            looked_at()

    look.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save does not warn of it
    leaf.register_hook(look)
    hooks: Any = weakref.ref(leaf._backward_hooks)


def _goes_on(node: Any) -> bool:
    """Whether the backward pass under way comes to a node."""
    try:
        return executes_node(node)
    except RuntimeError:  # its gradient is what was asked for
        return True
