"""Graph convolution on relations: a relation is a kernel offset of an irregular kernel map.

y[i] = sum over relations r of the mean (or sum) over the edges j -> i of r of x[j] @ weight[r]. The
edges of a relation into one node are averaged first, so that each such group is multiplied once;
all relations are then one grouped product. The gradients of weight and x run the same way; no
floats are added atomically.
"""

from __future__ import annotations

import functools
import itertools

import torch

from ...errors import CoordinateError, DataTypeError, UnsupportedError
from ..conv.convolution import conv
from ..maps.entry_sums import EntrySums
from ..maps.kernel_map import KernelMap
from ..maps.pair_lists import PairLists
from ..maps.rulebook import Rulebook
from ..maps.segments import multiply
from ..traced import between_graphs
from .relational_checks import (
    INTEGERS,
    check_counts,
    check_edges,
    check_nodes,
    check_numbers,
    check_operands,
    check_residual,
)

AGGREGATIONS = ("mean", "sum")
_WORKSPACE = 32 << 20  # bytes of means and products that inference holds at a time, or as many as its result has


class RelationMap:
    """The edges of a graph, grouped by relation and target node: what a relational convolution
    follows. Build it once per graph (`relation_map`) and share it between layers and steps.

    n_in, n_out: source and target nodes.  n_relations: relations.  n_edges, n_groups: edges, and
    distinct pairs of relation and target among them.
    """

    def __init__(
        self, edge_index: torch.Tensor, edge_type: torch.Tensor, n_in: int, n_out: int, n_relations: int
    ) -> None:
        self.n_in, self.n_out, self.n_relations = n_in, n_out, n_relations
        self.device, self.n_edges = edge_index.device, edge_index.shape[1]
        source, target = edge_index.unbind(0)
        key = edge_type.long() * n_out + target.long()
        ordered, order = torch.sort(key, stable=True)
        new = torch.ones_like(ordered, dtype=torch.int32)
        new[1:] = ordered[1:] != ordered[:-1]
        group = new.cumsum(0, dtype=torch.int32) - 1
        bounds = torch.arange(n_relations + 1, device=self.device) * n_out
        firsts = torch.searchsorted(ordered, bounds)
        total = group[-1:] + 1 if self.n_edges else group.new_zeros(1)
        starts = torch.cat([group, total]).index_select(0, firsts)
        self._starts: list[int] = self._checked(source, target, edge_type, starts)
        self.n_groups = self._starts[-1]
        source = source.index_select(0, order).to(self._index)
        every = torch.arange(self.n_groups + 1, dtype=torch.int32, device=self.device)
        begins = torch.searchsorted(group, every, out_int32=True)
        self._targets = (ordered % max(n_out, 1)).index_select(0, begins[:-1]).to(self._index)
        self._source, self._begins = source, begins
        self._sums: dict[str, EntrySums] = {}
        self._parts: dict[int, list[tuple[slice, RelationMap]]] = {}

    def __repr__(self) -> str:
        nodes = f"{self.n_in} -> {self.n_out} nodes"
        return f"RelationMap({self.n_relations} relations, {nodes}, {self.n_edges} edges)"

    @property
    def _index(self) -> torch.dtype:
        """torch scatters faster by int64 on CPUs; kernels take int32."""
        return torch.int64 if self.device.type == "cpu" else torch.int32

    def _checked(
        self, source: torch.Tensor, target: torch.Tensor, relation: torch.Tensor, starts: torch.Tensor
    ) -> list[int]:
        """`starts` on the host, in the one wait for the device. Raises CoordinateError."""
        if not self.n_edges:
            return [0] * (self.n_relations + 1)
        bounds = [end.long().view(1) for t in (source, target, relation) for end in t.aminmax()]
        numbers: list[int] = torch.cat([*bounds, starts.long()]).tolist()
        limits = (("source node", self.n_in), ("target node", self.n_out), ("relation", self.n_relations))
        for index, (name, limit) in enumerate(limits):
            least, most = numbers[2 * index : 2 * index + 2]
            if least < 0 or most >= limit:
                raise CoordinateError(
                    f"an edge names {name} {least if least < 0 else most}; expected 0 <= {name} < {limit}."
                )
        return numbers[6:]

    @functools.cached_property
    def kmap(self) -> KernelMap:
        """From groups (or, where each has one edge, from source nodes) to target nodes."""
        single = self.n_groups == self.n_edges
        x_rows = self._source if single else torch.arange(self.n_groups, device=self.device)
        lists = PairLists(x_rows.to(self._index), self._targets, self._starts, False)
        n_x = self.n_in if single else self.n_groups
        # Tables of all relations would hold next to nothing: lists of pairs only.
        return KernelMap(Rulebook(n_x, self.n_out, self.n_relations, self.device, lists=lists, regular=False))

    def groups(self, aggr: str) -> EntrySums | None:
        """From source nodes to groups; None where each has one edge."""
        if self.n_groups == self.n_edges:
            return None
        sums = self._sums.get(aggr)
        if sums is None:
            sums = EntrySums(self._source, self._begins, self.n_in, mean=aggr == "mean")
            self._sums[aggr] = sums
        return sums

    def parts(self, n: int) -> list[tuple[slice, RelationMap]]:
        """The same edges by ranges of target nodes, about `n` parts with about as many groups each.
        Made once; waits for the device once and for each part."""
        parts = self._parts.get(n)
        if parts is None:
            ends = torch.bincount(self._targets, minlength=self.n_out).cumsum(0)
            targets = torch.arange(1, n, device=self.device) * self.n_groups // n
            cuts = torch.searchsorted(ends, targets, right=True).tolist()
            bounds = sorted({0, *cuts, self.n_out})
            counts = self._begins.diff()
            target = self._targets.repeat_interleave(counts, output_size=self.n_edges).long()
            relation = self._relations().repeat_interleave(counts, output_size=self.n_edges)
            parts = []
            for begin, end in itertools.pairwise(bounds):
                mine = ((target >= begin) & (target < end)).nonzero().squeeze(1)
                edges = torch.stack([self._source.index_select(0, mine), target[mine] - begin])
                part = RelationMap(edges, relation[mine], self.n_in, end - begin, self.n_relations)
                parts.append((slice(begin, end), part))
            self._parts[n] = parts
        return parts

    def _relations(self) -> torch.Tensor:
        """The relation of every group."""
        counts = torch.tensor(self._starts, device=self.device).diff()
        every = torch.arange(self.n_relations, device=self.device)
        return every.repeat_interleave(counts, output_size=self.n_groups)

    def lookups(self, nodes: torch.Tensor, n_table: int, aggr: str) -> tuple[EntrySums, EntrySums]:
        """(from rows relation * n_table + nodes[source] of a table to groups, from groups to target nodes). nodes:
        int32 or int64 [n_in], 0 .. n_table - 1, which is not checked.  aggr: "mean" or "sum" over the edges of a
        group."""
        counts = self._begins.diff()
        of_edge = self._relations().repeat_interleave(counts, output_size=self.n_edges)
        rows = of_edge * n_table + nodes.index_select(0, self._source).long()
        first = EntrySums(rows, self._begins, self.n_relations * n_table, mean=aggr == "mean")
        targets, order = torch.sort(self._targets, stable=True)
        bounds = torch.arange(self.n_out + 1, dtype=targets.dtype, device=self.device)
        starts = torch.searchsorted(targets, bounds, out_int32=True)
        return first, EntrySums(order, starts, self.n_groups)


@between_graphs
def relation_map(
    edge_index: torch.Tensor, edge_type: torch.Tensor, n_relations: int, n_out: int, n_in: int | None = None
) -> RelationMap:
    """Group the edges of a graph by relation and target node.

    Args:
        edge_index: int32 or int64 [2, E]: source node and target node of every edge, any order,
            repeats allowed.
        edge_type: int32 or int64 [E], the relation of every edge.
        n_relations: how many relations there are.
        n_out: target nodes.  n_in: source nodes; None: the same nodes.

    Returns: the map. It waits for the device once, to see the bounds.
    Raises: ShapeError, DataTypeError, DeviceError (such as the meta device), UnsupportedError (sparse
        tensors), CoordinateError (an edge that names a node or a relation that there is not).
    """
    check_edges(edge_index, edge_type)
    n_in, n_out, n_relations = check_counts(n_in, n_out, n_relations)
    with torch.no_grad():
        return RelationMap(edge_index, edge_type, n_in, n_out, n_relations)


@between_graphs
def relational_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    relations: RelationMap,
    *,
    aggr: str = "mean",
    residual: torch.Tensor | None = None,
    allow_tf32: bool = False,
) -> torch.Tensor:
    """y[i] = sum over relations r of the mean over the edges j -> i of r of x[j] @ weight[r].

    Args:
        x: [n_in, C_in], fp16 / bf16 / fp32 / fp64; or int32 / int64 [n_in], the numbers of nodes
            whose features are one-hot: row x[j] of weight[r] is looked up.
        weight: [R, C_in, C_out], or block-diagonal [R, B, C_in / B, C_out / B].
        relations: from `relation_map`.
        aggr: "mean" or "sum" over the edges of one relation into one node.
        residual: [n_out, C_out] of the result's dtype (under autocast of any float dtype but fp64, which
            is left alone), added to the result.
        allow_tf32: as in `conv`.

    Returns: [n_out, C_out] in x's dtype (the weight's for node numbers); under autocast in the
        autocast dtype. Gradients reach x, weight and residual, and are bitwise repeatable.
    Raises: ShapeError, DataTypeError, DeviceError, CoordinateError, UnsupportedError.
    """
    if aggr not in AGGREGATIONS:
        raise UnsupportedError(f"aggr={aggr!r}; expected one of {', '.join(AGGREGATIONS)}.")
    if not isinstance(relations, RelationMap):
        raise DataTypeError(f"relations is {type(relations).__name__}; expected a map of `relation_map`.")
    check_nodes(x, "x")
    dtype = check_operands(x, weight, relations)
    if x.dtype in INTEGERS:
        check_numbers(x, weight.shape[1], "x")
    if residual is not None:
        c_out = weight.shape[2] if weight.ndim == 3 else weight.shape[1] * weight.shape[3]
        check_residual(residual, relations.n_out, c_out, dtype, relations.device)
    return convolved(x, weight, relations, dtype, aggr=aggr, residual=residual, allow_tf32=allow_tf32)


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    relations: RelationMap,
    dtype: torch.dtype,
    *,
    aggr: str,
    residual: torch.Tensor | None,
    allow_tf32: bool,
) -> torch.Tensor:
    """`relational_conv` of operands and a residual that were checked: [n_out, C_out] in `dtype`, what `check_operands`
    said."""
    if x.dtype in INTEGERS:
        y = _looked_up(x, weight, relations, aggr)
        return (y if residual is None else y + residual).to(dtype)
    groups = 1
    if weight.ndim == 4:
        groups = weight.shape[1]
        weight = weight.transpose(1, 2).flatten(2)
    leaves = (x, weight, residual)
    trains = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in leaves)
    fused = None if trains else residual
    run = functools.partial(_products, aggr=aggr, groups=groups, allow_tf32=allow_tf32)
    width = groups * weight.shape[1] + weight.shape[2]
    workspace = max(_WORKSPACE, x.element_size() * relations.n_out * groups * weight.shape[2])
    n_parts = 1 if trains else -(-4 * width * relations.n_groups // workspace)
    if n_parts < 2:
        y = run(x, weight, relations, fused)
    else:  # one after another, so that what they hold in between stays small
        y = x.new_empty(0)
        for rows, part in relations.parts(n_parts):
            piece = run(x, weight, part, None if fused is None else fused[rows])
            if not rows.start:
                y = piece.new_empty((relations.n_out, piece.shape[1]))
            y[rows] = piece
    if residual is None or fused is not None:
        return y
    return y + (residual if residual.dtype == dtype else residual.to(dtype))


def _products(
    x: torch.Tensor,
    weight: torch.Tensor,
    relations: RelationMap,
    residual: torch.Tensor | None,
    *,
    aggr: str,
    groups: int,
    allow_tf32: bool,
) -> torch.Tensor:
    """Means by group, then one product of all relations."""
    sums = relations.groups(aggr)
    rows = x if sums is None else multiply(x, sums)
    return conv(rows, weight, None, relations.kmap, groups=groups, residual=residual, allow_tf32=allow_tf32)


def _looked_up(nodes: torch.Tensor, weight: torch.Tensor, relations: RelationMap, aggr: str) -> torch.Tensor:
    to_groups, to_nodes = relations.lookups(nodes, weight.shape[1], aggr)
    return multiply(multiply(weight.flatten(0, 1), to_groups), to_nodes)
