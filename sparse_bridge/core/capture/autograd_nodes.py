"""What autograd has recorded of a computation: its nodes, and the tensors that they keep for a backward pass."""

from __future__ import annotations

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
