"""Training norms behind convolutions become operators, with the ReLU that follows.

Eager layers take the same kernels, see `core.ops.trained_norms`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from .. import norms
from ..fusion import arguments_of_batch_norm

ops: Any = torch.ops.sparse_bridge
_RELU = (F.relu, torch.relu, torch.relu_)


def take(graph: Graph) -> None:
    """Change `graph`, which `torch.compile` made, in place."""
    for node in list(graph.nodes):
        if node.target is F.batch_norm:
            _take(graph, node)


def _take(graph: Graph, node: Node) -> None:
    x, mean, var, gain, beta, training, momentum, eps = arguments_of_batch_norm(node)
    value = x.meta.get("example_value") if isinstance(x, Node) else None
    if (
        training is not True
        or not isinstance(momentum, float)
        or not isinstance(eps, float)
        or (mean is None) != (var is None)
        or getattr(x, "target", None) not in (ops.conv, ops.conv.default)
        or value is None
        or value.dim() != 2
        or value.device.type not in norms.DEVICES
    ):
        return
    users = list(node.users)
    relu = len(users) == 1 and users[0].target in _RELU and users[0].args[:1] == (node,)
    with graph.inserting_before(node):
        normed = graph.call_function(ops.batch_norm.default, (x, gain, beta, eps, relu))
        y = graph.call_function(_first, (normed,))
        for number, running in enumerate((mean, var)):
            if running is not None:
                graph.call_function(_moved, (running, normed, number, momentum))
    last = users[0] if relu else node
    y.meta = dict(last.meta)
    last.replace_all_uses_with(y)
    for replaced in dict.fromkeys((last, node)):
        graph.erase_node(replaced)


def _first(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return results[0]


@torch.fx.node.has_side_effect
def _moved(running: torch.Tensor, results: tuple[torch.Tensor, ...], number: int, momentum: float) -> None:
    """Move a running statistic, as `norms.normalised` does."""
    with torch.no_grad():
        norms.move(running, results[1][number], momentum)
