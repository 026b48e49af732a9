"""Lowering: a graph of operators becomes the straight-line program that runs it.

What a graph says once, a program decides once: operators are called past torch's dispatcher,
convolutions launch by plans of their own, and counters of changes that nobody makes are not asked.
Graphs stay `torch.fx` graphs, and torch writes the Python of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ...conv.plan import ConvForm
from .. import handles
from ..library import functions
from ..products import map_of
from . import chains, map_steps
from .conv_step import ConvStep
from .maps import MAPS, same_rows, sites_of_handle

ops: Any = torch.ops.sparse_bridge


def lower(graph: Graph) -> None:
    """Change `graph` in place, of plain tensors that nobody differentiates and, but for inputs that
    nothing else reads, nobody writes to."""
    _fix_versions(graph)
    _once(graph)
    objects: set[Node] = set()
    for node in list(graph.nodes):
        name = _name(node)
        if name in MAPS:
            objects |= _map(graph, node, name, objects)
        elif name in ("conv", "conv_fused"):
            _conv(graph, node, objects)
        elif name == "conv_backward":
            _gradients(graph, node)
        elif name in functions and not _has_lists(name):
            _replace(graph, node, functions[name], list(_arguments(node, name).values()))
    _with_handles(graph, objects)
    graph.eliminate_dead_code()
    chains.hoist(graph)
    map_steps.join(graph)
    chains.join(graph)
    graph.eliminate_dead_code()


def _name(node: Node) -> str | None:
    """Of the operator of this package that a node calls."""
    target = node.target
    if node.op != "call_function" or not hasattr(target, "_schema"):
        packet = getattr(target, "_qualified_op_name", "")
        return packet.removeprefix("sparse_bridge::") if packet.startswith("sparse_bridge") else None
    name = target._schema.name
    return name.removeprefix("sparse_bridge::") if name.startswith("sparse_bridge::") else None


def _has_lists(name: str) -> bool:
    """Whether an operator takes lists of tensors, or names some arguments only."""
    arguments = getattr(ops, name).default._schema.arguments
    return any(argument.kwarg_only or "List[Tensor]" in str(argument.type) for argument in arguments)


def _arguments(node: Node, name: str) -> dict[str, Any]:
    """By name, in the order of the schema."""
    schema = getattr(ops, name).default._schema
    by_name = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False))
    by_name.update(node.kwargs)
    return {parameter.name: by_name.get(parameter.name, parameter.default_value) for parameter in schema.arguments}


def _fix_versions(graph: Graph) -> None:
    """Counters of changes are 0 where nothing is changed."""
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("prims._tensor_version"):
            zero: Any = 0
            node.replace_all_uses_with(zero)
            graph.erase_node(node)


def _once(graph: Graph) -> None:
    """Coordinates that are entered twice are entered once; checks that maps make, too, go."""
    first_of: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if _name(node) == "coordinates":
            first = first_of.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target is torch.ops.aten._assert_scalar.default and _least(node.args[0]):
            graph.erase_node(node)


def _least(check: Any) -> bool:
    """Whether it is that new coordinates have so many rows, which `new_map` checks."""
    rows = check.args[0] if isinstance(check, Node) and check.target is operator.ge else None
    return (
        isinstance(rows, Node)
        and rows.target is torch.ops.aten.sym_size.int
        and isinstance(coords := rows.args[0], Node)
        and coords.target is operator.getitem
        and _name(coords.args[0]) == "new_map"  # type: ignore[arg-type]
    )


def _map(graph: Graph, node: Node, name: str, objects: set[Node]) -> set[Node]:
    """Lower an operator of maps: the nodes whose values are objects."""
    run, object_results = MAPS[name]
    arguments = _arguments(node, name)
    if "handle" in arguments and arguments["handle"] not in objects:
        with graph.inserting_before(node):
            arguments["handle"] = graph.call_function(sites_of_handle, (arguments["handle"],))
    lowered = _replace(graph, node, run, list(arguments.values()))
    if object_results is None:
        return {lowered}
    return {user for user in lowered.users if user.args[1] in object_results}


def _conv(graph: Graph, node: Node, objects: set[Node]) -> None:
    name = _name(node)
    named = _arguments(node, str(name))
    read = [named[name] for name in ("layout", "groups", "precision", "dataflow")]
    end = named.get("eps", 0.0), named.get("activation"), named.get("alpha", 0.0)
    if any(isinstance(value, Node) for value in end):
        return  # `dynamic=True` has norms' constants vary
    if named["kmap"].target is same_rows and not named["kmap"].args[1]:
        named["kmap"] = None  # of as many rows as x has
    elif named["kmap"] not in objects:
        with graph.inserting_before(node):
            named["kmap"] = graph.call_function(map_of, (named["kmap"], False))
    step = ConvStep(ConvForm(*read), named["transposed"], *end)
    operands = [named.get(name) for name in ("x", "weight", "bias", "kmap", "mean", "var", "gain", "beta", "residual")]
    _replace(graph, node, step, operands)


def _gradients(graph: Graph, node: Node) -> None:
    """A weight's gradient that is cast at once is made in that dtype: its sums are wider anyway."""
    lowered = _replace(graph, node, functions["conv_backward"], list(_arguments(node, "conv_backward").values()))
    for dw in [user for user in lowered.users if user.args[1] == 1]:
        casts = list(dw.users)
        if len(casts) != 1 or casts[0].target is not torch.ops.aten._to_copy.default:
            continue
        dtype = casts[0].kwargs.get("dtype")
        if dtype == torch.float32 and set(casts[0].kwargs) <= {"dtype", "layout", "device"}:
            lowered.kwargs = {"dw_dtype": dtype}
            casts[0].replace_all_uses_with(dw)
            graph.erase_node(casts[0])


def _with_handles(graph: Graph, objects: set[Node]) -> None:
    """Hand handles of objects to what was not lowered."""
    for node in objects:
        others = [user for user in node.users if not _takes_objects(user)]
        if others:
            with graph.inserting_after(node):
                handle = graph.call_function(handles.make, (node,))
            for user in others:
                user.replace_input_with(node, handle)


_RUN = [run for run, _ in MAPS.values()]


def _takes_objects(node: Node) -> bool:
    return isinstance(node.target, ConvStep) or node.target in _RUN


def _replace(graph: Graph, node: Node, run: Callable[..., Any], operands: list[Any]) -> Node:
    with graph.inserting_before(node):
        lowered = graph.call_function(run, tuple(operands))
    lowered.meta = dict(node.meta)
    node.replace_all_uses_with(lowered)
    graph.erase_node(node)
    return lowered
