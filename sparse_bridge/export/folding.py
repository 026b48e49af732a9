"""Norms, biases and activations behind a product become part of its node.

A norm in eval mode multiplies and shifts every channel: so can the weight and a bias. Sums are made
in fp64 and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.conv.epilogue import ACTIVATIONS
from . import nodes
from .graph import Graph, attribute, set_attribute

_BY_OPERATOR = {row.onnx: row for row in ACTIVATIONS.values() if row.act_type}


class _Product(NamedTuple):
    """A node that multiplies rows by a constant weight. axis: of the weight, its output channels.
    bias: index of that input, None where it has none.  activates: it has act_type."""

    node: Any
    axis: int
    bias: int | None
    activates: bool


class _Affine(NamedTuple):
    """y -> y * scale + shift, per channel."""

    scale: np.ndarray
    shift: np.ndarray


def _product_of(node: Any) -> _Product | None:
    if node.domain == nodes.DOMAIN:
        if node.op_type == "ImplicitGemm":
            return _Product(node, 0, 5, True)
        return _Product(node, 0, None, False) if node.op_type == "IndiceConv" else None
    if node.op_type != "Gemm" or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "transA"):
        return None
    if len(node.input) > 2 and attribute(node, "beta", 1.0) != 1.0:
        return None
    return _Product(node, 0 if attribute(node, "transB") else 1, 2, False)


def _per_channel(value: np.ndarray | None, channels: int) -> np.ndarray | None:
    """A constant that acts on rows [N, channels] per channel, as fp64 [channels]; else None."""
    if value is None or value.dtype != np.float32 or value.ndim > 2:
        return None
    if value.size != 1 and (value.size != channels or value.shape[-1] != channels):
        return None
    return np.broadcast_to(value.astype(np.float64).reshape(-1), (channels,))


def _norm(graph: Graph, node: Any, channels: int) -> _Affine | None:
    if attribute(node, "training_mode", 0) or len(node.output) != 1:
        return None
    vectors = [_per_channel(graph.constant(name), channels) for name in node.input[1:5]]
    constants = [vector for vector in vectors if vector is not None]
    if len(constants) != 4:
        return None
    gain, beta, mean, var = constants
    scale = gain / np.sqrt(var + attribute(node, "epsilon", 1e-5))
    return _Affine(scale, beta - mean * scale)


def _affine(graph: Graph, node: Any, value: str, channels: int) -> _Affine | None:
    """What a node does to the rows `value` if it is a norm, or adds or multiplies a constant."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "BatchNormalization" and node.input[0] == value:
        return _norm(graph, node, channels)
    if node.op_type not in ("Add", "Mul"):
        return None
    other = node.input[1] if node.input[0] == value else node.input[0]
    constant = _per_channel(graph.constant(other), channels)
    if constant is None:
        return None
    if node.op_type == "Add":
        return _Affine(np.ones(channels), constant)
    return _Affine(constant, np.zeros(channels))


def fold(graph: Graph) -> None:
    """Rewrite every product of the graph with what alone follows it."""
    weights: dict[tuple[str, bytes], str] = {}  # layers that are called twice keep one weight
    for node in list(graph.nodes):
        product = _product_of(node)
        if product is not None:
            _fold(graph, product, weights)
    graph.prune()


def _fold(graph: Graph, product: _Product, weights: dict[tuple[str, bytes], str]) -> None:
    node, slot = product.node, product.bias
    weight = graph.constant(node.input[1])
    if weight is None or weight.dtype != np.float32:
        return  # the network computes it
    channels = weight.shape[product.axis]
    scale, shift = np.ones(channels), np.zeros(channels)
    if slot is not None and len(node.input) > slot:
        bias = _per_channel(graph.constant(node.input[slot]), channels)
        if bias is None:
            return
        shift = bias
    output, followers = node.output[0], []
    while (follower := graph.only_user(output)) is not None:
        affine = _affine(graph, follower, output, channels)
        if affine is None:
            break
        scale, shift = scale * affine.scale, shift * affine.scale + affine.shift
        followers.append(follower)
        output = follower.output[0]
    if product.activates:
        output = _activate(graph, node, output, followers)
    if output == node.output[0]:
        return
    for absorbed in followers:
        graph.nodes.remove(absorbed)
    name = node.input[1]
    if (scale != 1).any():
        shape = [-1 if axis == product.axis else 1 for axis in range(weight.ndim)]
        scaled = (weight.astype(np.float64) * scale.reshape(shape)).astype(np.float32)
        key = name, scaled.tobytes()
        if key not in weights:
            weights[key] = graph.add_constant(f"{name}_folded", scaled)
        node.input[1] = weights[key]
    _shift(graph, product, shift.astype(np.float32), f"{name}_bias", output)


def _activate(graph: Graph, node: Any, output: str, followers: list[Any]) -> str:
    """Name of the value behind an activation that alone follows, which the node then applies."""
    follower = graph.only_user(output)
    row = None if follower is None or follower.domain else _BY_OPERATOR.get(follower.op_type)
    set_attribute(node, "act_type", 0 if row is None else row.act_type)
    if row is None:
        return output
    if row.slope is not None:
        set_attribute(node, "act_alpha", float(attribute(follower, "alpha", 0.01)))
    followers.append(follower)
    last: str = follower.output[0]
    return last


def _shift(graph: Graph, product: _Product, shift: np.ndarray, base: str, output: str) -> None:
    """`output` is the product, shifted."""
    node, slot = product.node, product.bias
    if not shift.any() and (slot is None or len(node.input) <= slot):
        node.output[0] = output
        return
    name = graph.add_constant(base, shift)
    if slot is None:
        graph.insert_after(node, graph.make("Add", [node.output[0], name], output))
        return
    node.output[0] = output
    del node.input[slot:]
    node.input.append(name)
    if node.op_type == "Gemm":
        set_attribute(node, "beta", 1.0)
