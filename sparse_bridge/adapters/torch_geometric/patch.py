"""Seams of an installed PyG: the forward passes of its relational layers, looked up when called."""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ... import hooks, state
from ...core.ops.relational import RelationMap, relation_map
from ...core.ops.relational_checks import INTEGERS, number_bounds
from ...core.ops.relational_layer import forward, node_inputs
from ...errors import CoordinateError, UnsupportedError
from ..base import Patch
from ..call_stats import note
from ..steps import Steps

_VERSIONS = ">=2.3"
_AGGREGATIONS = {"mean": "MeanAggregation", "add": "SumAggregation", "sum": "SumAggregation"}
_COMPILED = ("propagate", "collect")  # of each class, PyG writes its own at the first object
_NODE_AXES = 0, -2
_MOST = 8  # graphs that are kept
# Where a message passing layer keeps the hooks of what the bridge does not call.
_HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("", "_pre")
)
# What RGCNConv notes of itself when it is called, anew each time; TorchScript wants it to be there.
_NOTED = "_use_segment_matmul_heuristic_output"


class _Graphs:
    """Relation maps of the last graphs, as long as their edges live unchanged: a training run asks
    for the same graph in every layer and step. Changes are seen by torch's version counter, as
    autograd sees them."""

    def __init__(self) -> None:
        self._edges: dict[Any, tuple[weakref.ref[torch.Tensor], ...]] = {}
        self._maps: dict[Any, RelationMap] = {}

    def find(
        self, edge_index: torch.Tensor, edge_type: torch.Tensor, sizes: tuple[int, int, int], flow: str
    ) -> RelationMap:
        """sizes: relations, target nodes, source nodes."""
        edges = (edge_index, edge_type)
        turned = flow == "target_to_source"
        if any(tensor.is_inference() for tensor in edges):  # they count no versions
            return relation_map(edge_index.flip(0) if turned else edge_index, edge_type, *sizes)
        key = (*(id(tensor) for tensor in edges), sizes, turned)
        now = tuple(tensor._version for tensor in edges)
        references = self._edges.get(key)
        if references is not None and all(a() is b for a, b in zip(references, edges, strict=True)):
            result = self._maps.get((key, now))
            if result is not None:
                return result
        result = relation_map(edge_index.flip(0) if turned else edge_index, edge_type, *sizes)
        self._forget(key)
        while len(self._edges) >= _MOST:
            self._forget(next(iter(self._edges)))
        gone = functools.partial(self._gone, key)
        self._edges[key] = tuple(weakref.ref(tensor, gone) for tensor in edges)
        self._maps[key, now] = result
        return result

    def _gone(self, key: Any, reference: weakref.ref[torch.Tensor]) -> None:
        if reference in self._edges.get(key, ()):
            self._forget(key)

    def _forget(self, key: Any) -> None:
        self._edges.pop(key, None)
        for old in [entry for entry in self._maps if entry[0] == key]:
            self._maps.pop(old, None)

    def reset(self) -> None:
        """Forget the maps of all graphs."""
        self._edges.clear()
        self._maps.clear()

    def __len__(self) -> int:
        return len(self._maps)


graphs = _Graphs()  # of this process
reset = state.owns(graphs.reset)


class _Layer:
    """One of the two classes as PyG made it."""

    def __init__(self, fast: bool, original: Callable[..., Any]) -> None:
        from torch_geometric.nn import FastRGCNConv, RGCNConv, aggr

        layer_class = FastRGCNConv if fast else RGCNConv
        self.fast, self.original = fast, original
        self._steps = Steps(layer_class, "forward", original, but=_COMPILED)
        self._aggregations = {
            name: (kind, Steps(kind, "forward", also=("__call__", "forward")))
            for name, kind in ((name, getattr(aggr, kind)) for name, kind in _AGGREGATIONS.items())
        }

    def overridden(self, layer: Any) -> str | None:
        """Why PyG itself must run a layer that keeps its forward."""
        reason = self._steps.refusal(layer)
        if reason is not None:
            return reason
        layer_class, own = type(layer), vars(layer)
        for name in _COMPILED:
            step = getattr(layer_class, name, None)
            if name in own or (step is not None and not _compiled_by_pyg(step, layer_class)):
                return f"{name} is overridden"
        if own.get("node_dim", _NODE_AXES[0]) not in _NODE_AXES:
            return f"node_dim={layer.node_dim}"
        module = own["_modules"].get("aggr_module")
        kind, steps = self._aggregations[layer.aggr]
        if module is not None and not (type(module) is kind and hooks.unseen(module)):
            return "another aggr_module, or hooks on it"
        return None if module is None else steps.refusal(module)


def _compiled_by_pyg(step: Callable[..., Any], layer_class: type) -> bool:
    """Whether PyG wrote a step, for all of its layers or for a class or a base of it."""
    module = step.__module__
    if module.startswith("torch_geometric."):
        return True
    return any(module == f"{each.__module__}_{each.__name__}_propagate" for each in layer_class.__mro__)


def _refusal(layer: Any, x: Any, edge_index: Any, edge_type: Any, made: _Layer) -> str | None:
    """Why a call must run in PyG itself."""
    fast = made.fast
    if not isinstance(edge_index, torch.Tensor) or edge_index.layout != torch.strided:
        return "edges given as a sparse matrix"
    if edge_type is None:
        return "no edge_type"
    if layer.aggr not in _AGGREGATIONS:
        return f"aggr={layer.aggr!r}"
    if layer.explain:
        return "an explanation is being made"
    if not layer.weight.numel():
        return "a layer without relations or channels"
    fields = vars(layer)
    if any(fields.get(name) for name in _HOOKS):
        return "hooks on messages"
    reason = made.overridden(layer)
    if reason is not None:
        return reason
    source, target = node_inputs(layer, x)
    nodes = [source] if target is source else [source, target]
    reason = _edges_refusal(edge_index, edge_type) or next(filter(None, map(_nodes_refusal, nodes)), None)
    if reason is not None:
        return reason
    if not source.is_floating_point():
        if layer.num_blocks is not None:
            return "numbers of nodes with blocks"
        if fast and (x[0] if isinstance(x, tuple) else x) is not None:
            return "numbers of nodes"  # which FastRGCNConv takes from the edges instead
    if x is not None and any(not each.is_floating_point() and number_bounds(each)[0] < 0 for each in nodes):
        return "numbers of nodes counted from the end"
    return None


def _edges_refusal(edge_index: torch.Tensor, edge_type: Any) -> str | None:
    """Why PyG must say what it makes of these edges."""
    for name, tensor in (("edge_index", edge_index), ("edge_type", edge_type)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in INTEGERS:
            return f"{name} of {getattr(tensor, 'dtype', type(tensor).__name__)}"
        if tensor.is_meta:
            return "tensors without values"
    return None


def _nodes_refusal(nodes: Any) -> str | None:
    """Why PyG must say what it makes of these nodes."""
    if not isinstance(nodes, torch.Tensor) or nodes.layout != torch.strided:
        return "nodes that are no dense tensor"
    if nodes.is_meta:
        return "tensors without values"
    if not nodes.is_floating_point() and nodes.dtype not in INTEGERS:
        return f"nodes of {nodes.dtype}"
    return None if nodes.ndim == 1 + nodes.is_floating_point() else f"nodes of {nodes.ndim} axes"


def _relational(fast: bool) -> Callable[..., Any]:
    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        noted = _NOTED in original.__code__.co_names  # type: ignore[attr-defined]
        made = _Layer(fast, original)

        def run(layer: Any, x: Any, edge_index: Any, edge_type: Any) -> Any:
            reason, relations = _refusal(layer, x, edge_index, edge_type, made), None
            if reason is None:
                source, target = node_inputs(layer, x)
                sizes = (layer.num_relations, target.shape[0], source.shape[0])
                try:
                    relations = graphs.find(edge_index, edge_type, sizes, layer.flow)
                except CoordinateError:
                    if fast or layer.num_blocks is None:
                        raise
                    reason = "edges of no relation"  # which RGCNConv with blocks leaves out
            note("torch_geometric", type(layer).__name__, reason)
            if relations is None:
                return original(layer, x, edge_index, edge_type)
            if noted and not torch.compiler.is_compiling():
                vars(layer).setdefault(_NOTED, False)
            return forward(layer, x, relations, None)

        def bridged(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
            return run(self, x, edge_index, edge_type)

        return _among_the_names_of(original, bridged)

    return factory


def _among_the_names_of(original: Callable[..., Any], bridged: Callable[..., Any]) -> Any:
    """`bridged`, which uses no global name, with those of the original's module: TorchScript
    compiles the original's source under the names that it finds there."""
    names, code = original.__globals__, bridged.__code__  # type: ignore[attr-defined]
    function = types.FunctionType(code, names, bridged.__name__, None, bridged.__closure__)  # type: ignore[attr-defined]
    function.__defaults__ = bridged.__defaults__  # type: ignore[attr-defined]
    return functools.update_wrapper(function, original)


def patches() -> list[Patch]:
    """Patches for the PyG that is imported. Raises UnsupportedError before 2.3."""
    import torch_geometric
    from torch_geometric.nn import FastRGCNConv, RGCNConv

    release = tuple(int(part) for part in re.findall(r"\d+", torch_geometric.__version__)[:2])
    if release < (2, 3):
        raise UnsupportedError(
            f"torch_geometric {torch_geometric.__version__} is installed; the patches are written "
            f"for {_VERSIONS}. Install a newer one, or use "
            "sparse_bridge.core.functional.RelationalConv."
        )
    reason = "graph convolution on relations"
    return [
        Patch(owner, "forward", _relational(fast), reason, _VERSIONS, wraps=True)
        for owner, fast in ((FastRGCNConv, True), (RGCNConv, False))
    ]
