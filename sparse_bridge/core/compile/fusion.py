"""Inference in Inductor's graphs: norm, sum and activation behind a convolution become part of it.

Eager layers do that at run time (`core.conv.deferred.conv`). In a graph it is known beforehand what
follows, and that nobody else reads what lies between. Inductor calls `fuse` with the graph of what
a program called, before it takes norms apart.
"""

from __future__ import annotations

import operator
from types import MethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ...errors import require_type
from ..conv.activations import ACTIVATIONS, Activation
from .writes import writes_to

ops: Any = torch.ops.sparse_bridge
_SUMS = {operator.add: False, operator.iadd: True, torch.add: False, "add": False, "add_": True}
_HALVES = (torch.float16, torch.bfloat16)


class _End(NamedTuple):
    """What follows a product, as `conv_fused` has it. norm: mean, variance, gain and shift."""

    norm: tuple[Any, ...] = (None,) * 4
    eps: float = 0.0
    residual: Any = None
    activation: str | None = None
    alpha: float = 0.0


def fuse(graph: Graph) -> int:
    """Fuse in `graph`, which `torch.compile` made, in place; how many convolutions took something.

    For passes of your own over Inductor's graphs, `torch._inductor.config.pre_grad_custom_pass`.
    Raises: DataTypeError for what is no graph.
    """
    require_type("fuse()", graph, Graph, "a torch.fx.Graph")
    count = 0
    for node in list(graph.nodes):
        start = _product(node)
        if start is not None:
            count += _fused(graph, node, *start)
    return count


def _fused(graph: Graph, conv: Node, arguments: dict[str, Any], end: _End) -> bool:
    chain, y = [conv], _value(conv)
    if y is None or y.dim() != 2:
        return False
    while len(chain[-1].users) == 1 and end.activation is None:
        node = next(iter(chain[-1].users))
        value, more = _value(node), _with(end, node, chain[-1], y)
        if more is None or value is None or value.dtype != y.dtype or value.requires_grad:
            break
        end = more
        chain.append(node)
    first = [arguments[name] for name in ("x", "weight", "bias")]
    operands = [operand for operand in (*first, *end.norm, end.residual) if isinstance(operand, Node)]
    if len(chain) == 1 or y.requires_grad or writes_to(graph, chain, operands):
        return False
    with graph.inserting_before(chain[-1]):
        fused = graph.call_function(
            ops.conv_fused.default, (*arguments.values(), *end.norm, end.residual, end.eps, end.activation, end.alpha)
        )
    fused.meta = dict(chain[-1].meta)
    chain[-1].replace_all_uses_with(fused)
    for node in reversed(chain):
        graph.erase_node(node)
    return True


def _value(node: Any) -> torch.Tensor | None:
    """What stands for the node's result while the graph is made."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _product(node: Node) -> tuple[dict[str, Any], _End] | None:
    """The arguments of a convolution up to the end, and that."""
    if node.target in (ops.conv, ops.conv.default):
        return _arguments(node, ops.conv.default), _End()
    if node.target not in (ops.conv_fused, ops.conv_fused.default):
        return None
    arguments = _arguments(node, ops.conv_fused.default)
    norm = tuple(arguments.pop(name) for name in ("mean", "var", "gain", "beta"))
    return arguments, _End(norm, **{name: arguments.pop(name) for name in _End._fields[1:]})


def _arguments(node: Node, overload: Any) -> dict[str, Any]:
    """By name, in the order of the schema."""
    names = [argument.name for argument in overload._schema.arguments]
    by_name = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: by_name[name] for name in names}


def _with(end: _End, node: Node, producer: Node, y: torch.Tensor) -> _End | None:
    """`end` and what `node` does to the result of `producer`, if one epilogue can do both; else None."""
    steps = _norm(end, node, producer, y), _sum(end, node, producer, y), _activation(end, node, producer)
    return next((longer for longer in steps if longer is not None), None)


def _norm(end: _End, node: Node, producer: Node, y: torch.Tensor) -> _End | None:
    if node.target is not F.batch_norm or end.residual is not None or end.norm[0] is not None:
        return None
    x, mean, var, gain, beta, training, _, eps = _batch_norm(*node.args, **node.kwargs)
    vectors = [mean, var] if gain is None and beta is None else [mean, var, gain, beta]
    values = [_value(vector) for vector in vectors]
    if x is not producer or training or not all(_fits(value, y) for value in values):
        return None
    return end._replace(norm=(mean, var, gain, beta), eps=eps)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> tuple[Any, ...]:
    """The arguments of torch's function, by its own names."""
    return input, running_mean, running_var, weight, bias, training, momentum, eps


def _fits(vector: torch.Tensor | None, y: torch.Tensor) -> bool:
    """Whether the engine normalises `y` by this vector as torch does."""
    if vector is None or vector.dim() != 1 or vector.device != y.device:
        return False
    wide = vector.dtype == torch.float32 and y.dtype in _HALVES
    return (wide or vector.dtype == y.dtype) and _same(vector.shape, y.shape[1:])


def _sum(end: _End, node: Node, producer: Node, y: torch.Tensor) -> _End | None:
    in_place = _SUMS.get(node.target) if not node.kwargs and len(node.args) == 2 else None
    if in_place is None or end.residual is not None:
        return None
    left, right = node.args
    other: Any = right if left is producer else left
    value = _value(other)
    if value is None or other is producer or (in_place and left is not producer):
        return None
    if value.dtype != y.dtype or value.device != y.device or not _same(value.shape, y.shape):
        return None
    return end._replace(residual=other)


def _activation(end: _End, node: Node, producer: Node) -> _End | None:
    following = _BY_TARGET.get(node.target)
    if following is None or not node.args or node.args[0] is not producer:
        return None
    alpha, _ = following.arguments(*node.args[1:], **node.kwargs)
    return end._replace(activation=following.name, alpha=alpha)


# By the function that a node calls, or the name of the tensor's method.
_BY_TARGET: dict[Any, Activation] = {
    call.__name__ if isinstance(call, MethodDescriptorType) else call: row
    for row in ACTIVATIONS.values()
    for call in row.calls + row.calls_
}


def _same(left: Any, right: Any) -> bool:
    """Whether two shapes are known to be equal, without a new guard."""
    return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    pair = [getattr(getattr(size, "node", None), "expr", None) for size in (a, b)]
    return pair[0] is not None and bool(pair[0] == pair[1])
