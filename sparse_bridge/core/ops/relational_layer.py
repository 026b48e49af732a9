"""A layer of graph convolution on relations, with the parameters of PyG's `RGCNConv`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...errors import DeviceError, SettingError, ShapeError, UnsupportedError
from ..device import rocm
from ..device.torch_compat import allows_tf32
from ..traced import between_graphs
from .relational import AGGREGATIONS, RelationMap, convolved, relation_map
from .relational_checks import INTEGERS, check_dtypes, check_nodes, check_numbers, check_operands, size_of

Nodes = torch.Tensor | None


def relation_weight(weight: torch.Tensor, comp: torch.Tensor | None, sizes: tuple[int, int]) -> torch.Tensor:
    """[R, C_in, C_out] of basis matrices [B, C_in, C_out] and their shares comp [R, B] of the same float dtype;
    without shares the weight itself. sizes: (C_in, C_out). Follows autocast. (Basis decomposition: Schlichtkrull et
    al. 2017.)"""
    if comp is None:
        return weight
    return rocm.linear(comp, weight.flatten(1)).view(comp.shape[0], *sizes)


class RelationalConv(nn.Module):
    """y[i] = x[i] @ root + bias + sum over relations r of the mean (or sum) over the edges j -> i
    of r of x[j] @ weight[r] (Schlichtkrull et al. 2017).

    Constructor, parameters, initialisation and results are those of `torch_geometric.nn.RGCNConv`,
    so its state dicts load. No torch_geometric is needed.

    Args:
        in_channels: of the nodes, or of (source, target) nodes in a bipartite graph; without
            features, how many nodes there are.
        out_channels: of the result.
        num_relations: R, the number of edge types.
        num_bases: relations share this many matrices (weight [B, C_in, C_out], comp [R, B]).
        num_blocks: block-diagonal matrices (weight [R, blocks, C_in / blocks, C_out / blocks]).
        aggr: "mean", "sum" or "add" over the edges of one relation into one node.
        root_weight: whether a node's own features are added, by a matrix of their own.
        is_sorted: accepted; edges may come in any order.
        bias: whether to have one.
        flow: "source_to_target": edge_index holds (source, target); "target_to_source": the other
            way around.

    Raises: SettingError for bases together with blocks, for another flow. ShapeError for blocks that do not divide the
    channels, for sizes and numbers below 1. UnsupportedError for another aggr.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        flow: str = "source_to_target",
    ) -> None:
        super().__init__()
        if num_bases is not None and num_blocks is not None:
            raise SettingError("num_bases and num_blocks are both given; a layer takes one of them.")
        if aggr not in (*AGGREGATIONS, "add"):
            raise UnsupportedError(f"aggr={aggr!r}; expected mean, sum or add.")
        if flow not in ("source_to_target", "target_to_source"):
            raise SettingError(f"flow={flow!r}; expected source_to_target or target_to_source.")
        sizes = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
        if len(sizes) != 2:
            raise ShapeError(f"in_channels is {in_channels!r}; expected a number, or (source, target).")
        sizes = (size_of(sizes[0], "in_channels", 1), size_of(sizes[1], "in_channels", 1))
        size_of(out_channels, "out_channels", 1)
        size_of(num_relations, "num_relations", 1)
        for name, number in (("num_bases", num_bases), ("num_blocks", num_blocks)):
            if number is not None:
                size_of(number, name, 1)
        self.in_channels, self.out_channels, self.num_relations = (in_channels, out_channels, num_relations)
        self.in_channels_l, self.aggr, self.flow = sizes[0], aggr, flow
        self.num_bases, self.num_blocks, self.is_sorted = num_bases, num_blocks, is_sorted
        self.comp: nn.Parameter | None = None
        shape: tuple[int, ...] = (num_bases or num_relations, sizes[0], out_channels)
        if num_blocks is not None:
            if sizes[0] % num_blocks or out_channels % num_blocks:
                raise ShapeError(f"{sizes[0]} and {out_channels} channels do not divide into {num_blocks} blocks.")
            block = (sizes[0] // num_blocks, out_channels // num_blocks)
            shape = (num_relations, num_blocks, *block)
        self.weight = nn.Parameter(torch.empty(shape))
        if num_bases is not None:
            self.comp = nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = nn.Parameter(torch.empty(sizes[1], out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation of all matrices; the bias becomes zero."""
        for matrix in (self.weight, self.comp, self.root):
            if matrix is not None:
                bound = math.sqrt(6.0 / (matrix.size(-2) + matrix.size(-1)))
                nn.init.uniform_(matrix, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Nodes | tuple[Nodes, torch.Tensor],
        edge_index: torch.Tensor | RelationMap,
        edge_type: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: features [N, C_in], numbers of nodes [N] (int32 or int64), None for nodes 0 .. N - 1,
                or (source, target) of them.
            edge_index: int [2, E] with edge_type int [E]; or a `RelationMap` of them, which saves
                grouping the edges in every call.

        Returns: [N, C_out].
        Raises: as `relation_map` and `relational_conv`.
        """
        return forward(self, x, edge_index, edge_type)

    def extra_repr(self) -> str:
        """What torch prints of the layer: channels and relations."""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"


def node_inputs(layer: Any, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, target): features [N, C] of nodes, or their numbers int64 [N]; as they were given, unchecked."""
    source = x[0] if isinstance(x, tuple) else x
    if source is None:
        source = torch.arange(layer.in_channels_l, device=layer.weight.device)
    return source, x[1] if isinstance(x, tuple) else source


@between_graphs
def forward(layer: Any, x: Any, edge_index: Any, edge_type: torch.Tensor | None) -> torch.Tensor:
    """What a `RelationalConv`, or a layer with its attributes, makes of its inputs: [N, C_out] in the dtype of
    `relational_conv`. edge_type: int32 or int64 [E]; None beside a `RelationMap`.

    Raises: UnsupportedError without edge_type; what `relation_map` and `relational_conv` do.
    """
    if isinstance(x, tuple) and len(x) != 2:
        raise ShapeError(f"x is a tuple of {len(x)}; expected (source, target).")
    source, target = node_inputs(layer, x)
    check_nodes(source, "x[0]" if isinstance(x, tuple) else "x")
    if target is not source:
        check_nodes(target, "x[1]")
    relations = edge_index
    if not isinstance(relations, RelationMap):
        if edge_type is None:
            raise UnsupportedError("edge_type is None; give the relation of every edge, int [E].")
        if layer.flow == "target_to_source" and getattr(edge_index, "ndim", 0) == 2:
            edge_index = edge_index.flip(0)
        relations = relation_map(edge_index, edge_type, layer.num_relations, target.shape[0], source.shape[0])
    comp = layer.comp if layer.num_bases is not None else None
    weight = relation_weight(layer.weight, comp, (layer.in_channels_l, layer.out_channels))
    dtype = check_operands(source, weight, relations)
    given = x[0] if isinstance(x, tuple) else x
    if given is not None and source.dtype in INTEGERS:
        check_numbers(source, weight.shape[1], "x")
    residual = layer.bias
    if layer.root is not None:
        _check_target(target, layer.root, relations, layer.in_channels_l if target is source else None)
        if target.is_floating_point():
            residual = rocm.linear(target, layer.root, residual)
        else:
            rows = layer.root.index_select(0, target)
            residual = rows if residual is None else rows + residual
    elif residual is not None:
        residual = residual.expand(relations.n_out, -1)
    tf32 = allows_tf32()
    aggr = "sum" if layer.aggr == "add" else layer.aggr
    return convolved(source, weight, relations, dtype, aggr=aggr, residual=residual, allow_tf32=tf32)


def _check_target(target: torch.Tensor, root: torch.Tensor, relations: RelationMap, n_known: int | None) -> None:
    """Check target nodes (see `check_nodes`) against `root` [C, C_out] and the map.

    n_known: numbers of nodes are known to be below, as they are the source nodes; None: they are others.
    Raises: ShapeError, DataTypeError, DeviceError, CoordinateError (waits for the device).
    """
    name = "x[1]" if n_known is None else "x"
    if target.shape[0] != relations.n_out:
        raise ShapeError(
            f"{name} has {target.shape[0]} target nodes, the edges {relations.n_out}; give x as (source, target)."
        )
    if target.device != root.device:
        raise DeviceError(f"{name} is on {target.device}, the layer on {root.device}; move them to one device.")
    if target.dtype in INTEGERS:
        if n_known is None or n_known > root.shape[0]:
            check_numbers(target, root.shape[0], name)
        return
    if target.shape[1] != root.shape[0]:
        raise ShapeError(f"{name} has {target.shape[1]} channels, the layer's root expects {root.shape[0]}.")
    check_dtypes(target, root, name, "the layer's root")
