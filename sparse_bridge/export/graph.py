"""A file's nodes and constants, while they are rewritten."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np


def onnx_module() -> Any:
    """The package onnx. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ImportError('exporting needs the package onnx: pip install "sparse-bridge[onnx]".') from error


def read_by(node: Any) -> Iterator[str]:
    """Names that a node reads, those of graphs inside it included."""
    yield from node.input
    for attribute in node.attribute:
        for inner in [attribute.g, *attribute.graphs]:
            for inner_node in inner.node:
                yield from read_by(inner_node)
            yield from (value.name for value in inner.output)


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """Value of an attribute of a node."""
    for entry in node.attribute:
        if entry.name == name:
            return onnx_module().helper.get_attribute_value(entry)
    return default


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Write an attribute of a node, in place of what it had."""
    for index, entry in enumerate(node.attribute):
        if entry.name == name:
            del node.attribute[index]
            break
    node.attribute.append(onnx_module().helper.make_attribute(name, value))


class Graph:
    """Look-ups and edits of an onnx.ModelProto, in place."""

    def __init__(self, proto: Any) -> None:
        self.proto, self.graph = proto, proto.graph
        self.onnx = onnx_module()
        self._taken = {initializer.name for initializer in self.graph.initializer} | {
            name for node in self.graph.node for name in [*node.input, *node.output]
        }

    @property
    def nodes(self) -> Any:
        return self.graph.node

    @property
    def outputs(self) -> set[str]:
        return {value.name for value in self.graph.output}

    def maker(self, name: str) -> Any:
        """The node that gives a value; None for inputs and constants."""
        return next((node for node in self.nodes if name in node.output), None)

    def users(self, name: str) -> list[Any]:
        """Nodes that read a value, once for each time."""
        return [node for node in self.nodes for read in read_by(node) if read == name]

    def only_user(self, name: str) -> Any:
        """The node that alone reads a value; None where others do, or the file gives it."""
        users = self.users(name)
        return users[0] if len(users) == 1 and name not in self.outputs else None

    def constant(self, name: str) -> np.ndarray | None:
        """Value of a constant; None of anything else."""
        to_array = self.onnx.numpy_helper.to_array
        for initializer in self.graph.initializer:
            if initializer.name == name:
                value: np.ndarray = to_array(initializer)
                return value
        node = self.maker(name)
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Identity":
            return self.constant(node.input[0])
        tensor = attribute(node, "value") if node.op_type == "Constant" else None
        return None if tensor is None else to_array(tensor)

    def free_name(self, base: str) -> str:
        """`base`, or with a number behind it where that is taken."""
        name, count = base, 1
        while name in self._taken:
            name, count = f"{base}_{count}", count + 1
        self._taken.add(name)
        return name

    def add_constant(self, base: str, value: np.ndarray) -> str:
        """Name of a new constant."""
        name = self.free_name(base)
        self.graph.initializer.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def make(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        """A node of ONNX itself, which is in no graph yet."""
        return self.onnx.helper.make_node(op_type, inputs, [output], name=self.free_name(f"/{op_type}"), **attributes)

    def insert_after(self, node: Any, new: Any) -> None:
        self.nodes.insert(list(self.nodes).index(node) + 1, new)

    def replace(self, old: str, new: str) -> None:
        """Whoever reads `old` reads `new`; where the file gives `old`, it gives a copy."""
        for node in self.nodes:
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new
        if old in self.outputs:
            maker = self.maker(old)
            position = list(maker.output).index(old)
            maker.output[position] = self.free_name(f"{old}_unread")
            self.nodes.append(self.make("Identity", [new], old))

    def prune(self) -> None:
        """Drop nodes, constants and notes of types that nothing reads any more."""
        while True:
            read = self.outputs | {name for node in self.nodes for name in read_by(node)}
            dead = [node for node in self.nodes if not read & set(node.output)]
            if not dead:
                break
            for node in dead:
                self.nodes.remove(node)
        produced = {name for node in self.nodes for name in node.output}
        for items, names in ((self.graph.initializer, read), (self.graph.value_info, produced)):
            for item in [item for item in items if item.name not in names]:
                items.remove(item)
