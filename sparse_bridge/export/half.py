"""Sparse nodes, and what follows them row by row, in float16.

Inputs and outputs of the file stay float32: coordinates in metres do not fit float16. So do nodes
that are not listed here; TensorRT chooses their precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.conv.epilogue import ACTIVATIONS
from . import nodes
from .graph import Graph, attribute, read_by
from .plugin_checks import ExportError

_SPARSE = {"ImplicitGemm": (0, 1, 5), "IndiceConv": (0, 1)}  # inputs of features, weight, bias
# Nodes of ONNX that go on in float16, and which of their inputs are floats; None: all.
_ROWS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", *(row.onnx for row in ACTIVATIONS.values() if row.onnx)), (0,)),
    **dict.fromkeys(("Reshape", "Transpose", "Flatten"), (0,)),
    **dict.fromkeys(("Add", "Sub", "Mul", "MatMul"), (0, 1)),
    "Gemm": (0, 1, 2),
    "BatchNormalization": (0, 1, 2, 3, 4),
    "ScatterND": (0, 2),
    "Concat": None,
}


def to_half(graph: Graph) -> None:
    """Rewrite the graph. Raises ExportError where a constant leaves float16."""
    _Halves(graph).run()
    graph.prune()


class _Halves:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        types = graph.onnx.TensorProto
        self._float, self._half = int(types.FLOAT), int(types.FLOAT16)
        self._names: dict[str, str] = {}  # of values that float16 has, too
        self._narrowed: dict[str, str] = {}  # those of them that only nodes in float16 make

    def run(self) -> None:
        graph, nodes_now = self._graph, []
        for node in list(graph.nodes):
            floats = self._floats(node)
            if not floats:
                if node.op_type in ("Shape", "Size"):  # which do not read the values
                    node.input[0] = self._narrowed.get(node.input[0], node.input[0])
                nodes_now.append(node)
                continue
            for index in floats:
                casts, name = self._name_of(node.input[index])
                nodes_now += casts
                node.input[index] = name
            output = node.output[0]
            self._names[output] = self._narrowed[output] = graph.free_name(f"{output}_half")
            node.output[0] = self._narrowed[output]
            nodes_now.append(node)
        read = graph.outputs | {name for node in nodes_now for name in read_by(node) if name in self._narrowed}
        ordered = []
        for node in nodes_now:
            ordered.append(node)
            for wide, narrow in self._narrowed.items():
                if wide in read and narrow in node.output:
                    ordered.append(graph.make("Cast", [narrow], wide, to=self._float))
        copies = [graph.onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.nodes[:]
        graph.nodes.extend(copies)

    def _floats(self, node: Any) -> list[int]:
        """Indices of a node's float inputs, if it computes in float16."""
        sparse = node.domain == nodes.DOMAIN
        table = _SPARSE if sparse else _ROWS if node.domain in ("", "ai.onnx") else {}
        listed = table.get(node.op_type, ())
        indices = [i for i, name in enumerate(node.input) if name and (listed is None or i in listed)]
        if sparse:
            return indices
        names = [node.input[i] for i in indices]
        narrow = any(name in self._narrowed for name in names)
        return indices if narrow and all(map(self._can_be_half, names)) else []

    def _can_be_half(self, name: str) -> bool:
        return name in self._names or self._zeros(name) or self._graph.constant(name) is not None

    def _zeros(self, name: str) -> bool:
        maker = self._graph.maker(name)
        return maker is not None and maker.op_type == "ConstantOfShape"

    def _name_of(self, name: str) -> tuple[list[Any], str]:
        """(nodes that must come before, name of the value in float16)."""
        graph = self._graph
        if name in self._names:
            return [], self._names[name]
        constant = graph.constant(name)
        if constant is not None:
            self._names[name] = graph.add_constant(f"{name}_half", _rounded(name, constant))
            return [], self._names[name]
        narrow = self._names[name] = graph.free_name(f"{name}_half")
        if self._zeros(name):
            maker = graph.maker(name)
            helper, tensor = graph.onnx.numpy_helper, attribute(maker, "value")
            filled = np.zeros(1) if tensor is None else helper.to_array(tensor)
            value = helper.from_array(filled.astype(np.float16))
            filler = graph.make("ConstantOfShape", list(maker.input), narrow, value=value)
            return [filler], narrow
        return [graph.make("Cast", [name], narrow, to=self._half)], narrow


def _rounded(name: str, value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded: np.ndarray = value.astype(np.float16)
    if np.isinf(rounded).sum() > np.isinf(value).sum():
        raise ExportError(
            f"{name} has values of up to {np.abs(value).max():.3g}; float16 ends at 65504. Export in float32."
        )
    return rounded
