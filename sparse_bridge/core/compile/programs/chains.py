"""Convolutions of a program that follow each other become one step: a chain."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..writes import has_effects
from .conv_step import ChainStep, ConvStep, Link

_MOST = 200  # links of a chain
_OPERANDS = 9  # of a ConvStep


def join(graph: Graph) -> None:
    """Change `graph`, which writes to nothing, in place."""
    for group in _groups(graph):
        if len(group) > 1:
            _chain(graph, group)


def hoist(graph: Graph) -> None:
    """Have all that needs no convolution come before the first, but for what writes or draws random
    numbers, and what needs that."""
    convs = [node for node in graph.nodes if isinstance(node.target, ConvStep)]
    dependents, nodes = set(convs), list(graph.nodes)
    for node in nodes[nodes.index(convs[0]) :] if convs else ():
        if node in dependents or node.op in ("placeholder", "output"):
            continue
        if dependents.isdisjoint(node.all_input_nodes) and not has_effects(node):
            convs[0].prepend(node)
        else:
            dependents.add(node)


def _groups(graph: Graph) -> list[list[Node]]:
    """Convolutions, of which the others' results are needed by no other operation in between."""
    groups: list[list[Node]] = [[]]
    for node in graph.nodes:
        group = groups[-1]
        if isinstance(node.target, ConvStep):
            if group and (_dtype(node) != _dtype(group[0]) or len(group) == _MOST):
                groups.append([])
            groups[-1].append(node)
        elif not set(group).isdisjoint(node.all_input_nodes):
            groups.append([])
    return groups


def _dtype(node: Node) -> torch.dtype | None:
    """Of a convolution's input and result, where they are known to have one."""
    values = [operand.meta.get("example_value", operand.meta.get("val")) for operand in (node, node.args[0])]  # type: ignore[union-attr]
    dtypes = {getattr(value, "dtype", None) for value in values}
    return dtypes.pop() if len(dtypes) == 1 else None


def _chain(graph: Graph, group: list[Node]) -> None:
    dtype = _dtype(group[0])
    if dtype is None:
        return
    args = list(dict.fromkeys(operand for node in group for operand in node.all_input_nodes if operand not in group))
    index = {node: at for at, node in enumerate([*args, *group])}
    links = [_link(node, group, index) for node in group]
    step = ChainStep(links, len(args), dtype.itemsize)
    with graph.inserting_after(group[-1]):
        chain = graph.call_function(step, tuple(args))
    results = [node for node, link in zip(group, links, strict=True) if link.last < 0]
    at = chain
    for number, node in enumerate(results):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (chain, number))
        at.meta = dict(node.meta)
        node.replace_all_uses_with(at)
    for node in reversed(group):
        graph.erase_node(node)


def _link(node: Node, group: list[Node], index: dict[Node, int]) -> Link:
    operands: list[Any] = [*node.args, *[None] * (_OPERANDS - len(node.args))]
    indices = tuple(-1 if operand is None else index[operand] for operand in operands)
    return Link(node.target, indices, _last(node, group))  # type: ignore[arg-type]


def _last(node: Node, group: list[Node]) -> int:
    """The last link that reads a result; -1 where others do."""
    users = list(node.users)
    if not users or any(user not in group for user in users):
        return -1
    return max(group.index(user) for user in users)
