"""Nodes of autograd: what it has recorded of a computation, and the one that a replay is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def autograd_nodes(tensor: torch.Tensor) -> set[Any]:
    """The nodes behind a tensor, but for those that add to the gradients of parameters."""
    nodes: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes and not hasattr(node, "variable"):
            nodes.add(node)
            ahead += [following for following, _ in node.next_functions]
    return nodes


def only_own_functions(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether all that is written in Python behind these is the package's, which may be gone through twice."""
    nodes: set[Any] = set().union(*map(autograd_nodes, leaves))
    functions = [getattr(node, "_forward_cls", None) for node in nodes]  # what autograd's own nodes have not
    return all(one is None or one.__module__.startswith("sparse_bridge.") for one in functions)


def saved_for_backward(leaves: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[bool]:
    """By parameter, whether a backward pass by the leaves of an output reads it."""
    saved = [tensor.data_ptr() for node in set().union(*map(autograd_nodes, leaves)) for tensor in _saved_by(node)]
    places = [(parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes) for parameter in parameters]
    return [any(begin <= address < end for address in saved) for begin, end in places]


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node keeps for a backward pass still to come."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for value in [getattr(node, name) for name in names]:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


class ReplayNode(torch.autograd.Function):
    """A replayed model as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Any,
        leaves: tuple[torch.Tensor, ...],
        coords: torch.Tensor,
        features: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """run: the step that is replayed.  leaves: what its forward pass has computed."""
        ctx.run = run
        ctx.set_materialize_grads(False)
        # torch then says what it says of a graph that is gone, and of what was written to in between.
        # Parameters: the last first, as the layers' backward passes read them.
        ctx.save_for_backward(features, coords, *list(itertools.compress(run.parameters, run.graph.saved))[::-1])
        return leaves

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the features and of the parameters, by those of the leaves."""
        run, saved = ctx.run, ctx.saved_tensors
        features, coords = saved[:2]
        if torch.is_grad_enabled():  # with create_graph=True
            inputs = [features, *run.reached] if ctx.needs_input_grad[3] else run.reached
            computed = run.layers_again(features, coords, gradients, inputs)
        else:
            reached = [own is not None for own in run.graph.gradients]
            reached[0] = reached[0] or ctx.needs_input_grad[3]
            computed = list(itertools.compress(run.backward(features, coords, gradients), reached))
        return None, None, None, *(computed if ctx.needs_input_grad[3] else (None, *computed))
