"""The maps over the coordinates of a program become one step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Graph, Node

from ..coordinates import relative
from ..writes import has_effects
from .maps import MapNode, MapsStep, map_over, new_map, sites


def join(graph: Graph) -> None:
    """Change `graph`, which writes to nothing and whose convolutions come last, in place."""
    for root in [node for node in graph.nodes if node.target is sites]:
        _join(graph, root)


def _join(graph: Graph, root: Node) -> None:
    group = _group(graph, root)
    numbers = list(dict.fromkeys(size for node in group for size in _sizes(node) if isinstance(size, Node)))
    dependents = _dependents(graph, group)
    if len(group) < 2 or not dependents.isdisjoint(numbers):
        return
    step = MapsStep([_map_node(node, group, numbers) for node in group])
    with graph.inserting_after(group[-1]):
        at = joined = graph.call_function(step, (root.args[0], *numbers))
    for number, node in enumerate(group):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (joined, number))
        if node.target is map_over:
            with graph.inserting_after(at):
                at = graph.call_function(operator.getitem, (at, 0))
        at.meta = dict(node.meta)
        node.replace_all_uses_with(at)
    for node in list(graph.nodes):  # those that stood between them
        if node is joined:
            break
        if node in dependents and node not in group:
            at.append(node)
            at = node
    for node in reversed([root, *group]):
        if not node.users:
            graph.erase_node(node)


def _sizes(node: Node) -> Sequence[Any]:
    """The numbers that the builder of a map takes, as they are or as nodes."""
    numbers: Sequence[Any] = cast(Any, node.args[5])
    return numbers


def _group(graph: Graph, root: Node) -> list[Node]:
    """The maps over these coordinates, and over those that they make."""
    sources: set[Any] = {root}
    group = []
    for node in graph.nodes:
        if node.target in (map_over, new_map) and node.args[1] in sources:
            if any(isinstance(size, Node) for size in relative(node.args[4], node.args[5])):
                continue
            group.append(node)
            sources |= {user for user in node.users if user.args[1:] == (2,)}
    return group


def _dependents(graph: Graph, group: list[Node]) -> set[Node]:
    """These maps, all that depends on one of them, and behind the first all that has effects, whose
    order stays."""
    dependents, begun = set(group), False
    for node in graph.nodes:
        begun = begun or node in dependents
        if not dependents.isdisjoint(node.all_input_nodes) or (begun and has_effects(node)):
            dependents.add(node)
    return dependents


def _map_node(node: Node, group: list[Node], numbers: list[Node]) -> MapNode:
    source: Any = node.args[1]
    own = node.target is new_map
    maker = source.args[0] if source.target is operator.getitem else None
    sizes = tuple((True, numbers.index(size)) if isinstance(size, Node) else (False, size) for size in _sizes(node))
    returns_coords = own and any(user.args[1] == 1 and user.users for user in node.users)
    at = group.index(maker) if maker in group else -1
    return MapNode(at, node.args[4], sizes, node.args[6] if own else None, returns_coords)  # type: ignore[arg-type]
