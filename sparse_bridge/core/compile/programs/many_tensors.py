"""Small operations on many tensors become one: statistics of norms, and weights under autocast."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

aten: Any = torch.ops.aten
_ALIGNED = 16  # bytes, from which on kernels read several values at once
_flat: Any = torch._C._nn.unflatten_dense_tensors


def join(graph: Graph) -> None:
    """Change `graph`, of torch's own operators, in place."""
    _join_statistics(graph)
    _join_casts(graph)


@has_side_effect
def move_averages(running: list[torch.Tensor], now: list[torch.Tensor], keep: float, take: float) -> None:
    """running = running * keep + now * take, of many tensors: floats of one dtype, of any shape, in place."""
    torch._foreach_mul_(running, keep)
    torch._foreach_add_(running, now, alpha=take)


@has_side_effect
def count(counters: list[torch.Tensor], step: int) -> None:
    """Add `step` in place to many counters: integers of one dtype, of any shape."""
    torch._foreach_add_(counters, step)


def cast(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous copies in another dtype, which share memory, of contiguous tensors of any shape."""
    memory = tensors[0].new_empty(sum([tensor.numel() for tensor in tensors]), dtype=dtype)
    copies: list[torch.Tensor] = _flat(memory, tensors)
    torch._foreach_copy_(copies, tensors)
    return copies


class _Average:
    """A node that moves an average: running * keep + now * take, or running + take where now is
    None, is copied to `running`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.running: Any = None
        self.now: Any = None
        self.keep: Any = 1.0
        self.take: Any = 0
        self._read(*node.args)

    def _read(self, running: Any, total: Any, *more: Any) -> None:
        if not isinstance(total, Node) or total.target is not aten.add.Tensor:
            return
        addends: Any = total.args
        (left, right), dtype = addends, running.meta["val"].dtype
        if left is running and isinstance(right, (int, float)) and not total.kwargs:
            self.running, self.take = running, right
        elif (
            isinstance(left, Node)
            and left.target is aten.mul.Tensor
            and left.args[0] is running
            and isinstance(left.args[1], float)
            and isinstance(right, Node)
            and set(total.kwargs) <= {"alpha"}
            and right.meta["val"].dtype == dtype
        ):
            self.running, self.now = running, right
            self.keep, self.take = left.args[1], total.kwargs.get("alpha", 1)

    @property
    def alike(self) -> tuple[Any, ...]:
        """What averages that move together have in common."""
        value = self.running.meta["val"]
        return self.now is None, self.keep, self.take, value.dtype, value.device


def _join_statistics(graph: Graph) -> None:
    groups: dict[Any, list[_Average]] = defaultdict(list)
    inputs = {_memory(node) for node in graph.nodes if node.op == "placeholder"} - {None}
    for node in graph.nodes:
        if node.target is aten.copy_.default:
            average = _Average(node)
            if average.running is None or average.running.op != "placeholder":
                continue
            if average.now is None or _memory(average.now) not in inputs:  # which may be written to before
                groups[average.alike].append(average)
    for group in groups.values():
        if len(group) > 1:
            _move(graph, group)
    graph.eliminate_dead_code()


def _memory(node: Node) -> int | None:
    """The storage of a node's value; None: it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _move(graph: Graph, group: list[_Average]) -> None:
    """At the end of the graph, where the copies stood."""
    running, first = [average.running for average in group], group[0]
    with graph.inserting_after(group[-1].node):
        if first.now is None:
            graph.call_function(count, (running, first.take))
        else:
            now = [average.now for average in group]
            graph.call_function(move_averages, (running, now, first.keep, first.take))
    for average in group:
        average.node.replace_all_uses_with(average.running)
        graph.erase_node(average.node)


def _join_casts(graph: Graph) -> None:
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten._to_copy.default and _is_parameter_cast(node):
            groups[node.kwargs["dtype"]].append(node)
    for dtype, group in groups.items():
        if len(group) > 1:
            _cast_together(graph, group, dtype)


def _is_parameter_cast(node: Node) -> bool:
    source: Any = node.args[0]
    if source.op != "placeholder" or set(node.kwargs) != {"dtype"}:
        return False
    value, dtype = source.meta["val"], node.kwargs["dtype"]
    sizes: Sequence[Any] = value.shape
    return (
        all(isinstance(size, int) for size in sizes)
        and value.is_contiguous()
        and value.numel() * dtype.itemsize % _ALIGNED == 0  # type: ignore[union-attr]
        and value.numel() > 0
    )


def _cast_together(graph: Graph, group: list[Node], dtype: torch.dtype) -> None:
    with graph.inserting_before(group[0]):
        at = copies = graph.call_function(cast, ([node.args[0] for node in group], dtype))
    for number, node in enumerate(group):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (copies, number))
        at.meta = dict(node.meta)
        node.replace_all_uses_with(at)
        graph.erase_node(node)
