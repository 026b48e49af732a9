"""What autograd has recorded of a computation: its nodes, and the tensors that they keep for a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
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


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node keeps for a backward pass still to come."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for value in [getattr(node, name) for name in names]:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor
