"""What a part of a graph writes to, before its writes were made visible as results."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

_OPERATORS = frozenset(
    (
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.imatmul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.ilshift,
        operator.irshift,
        operator.setitem,
    )
)


def writes_to(graph: Graph, chain: Sequence[Node], operands: Iterable[Node]) -> bool:
    """Whether a node between the first and the last of `chain`, but none of `chain`, may write to
    the memory of `operands`. Also where that cannot be told."""
    own, memory = set(chain), set()
    for operand in operands:
        storages = _memory(operand)
        if storages is None:
            return True
        memory |= storages
    node = chain[0].next
    while node is not chain[-1]:
        if node not in own and _may_write(node):
            for operand in node.all_input_nodes:
                storages = _memory(operand)
                if storages is None or storages & memory:
                    return True
        node = node.next
    return False


def _memory(node: Node) -> set[int] | None:
    """The storages of what a node results in; None: not known."""
    if "example_value" not in node.meta:
        return None
    value = node.meta["example_value"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return {tensor.untyped_storage()._cdata for tensor in values if isinstance(tensor, torch.Tensor)}


def _may_write(node: Node) -> bool:
    """Whether a node may change memory of its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op not in ("call_function", "call_method"):
        return True
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in _OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return True
    schema = getattr(getattr(target, "default", target), "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    # `inplace=True`, training norms, `out=`
    arguments = (*node.args, *node.kwargs.values())
    return any(value is True for value in arguments) or "out" in node.kwargs
