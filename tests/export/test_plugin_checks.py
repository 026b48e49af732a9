"""What Autoware's plugins refuse of a node, the evaluator refuses, too: a table of spoilt files."""

from __future__ import annotations

import copy

import pytest

from tests.adapters.spconv import apis

onnx = pytest.importorskip("onnx")
import torch  # noqa: E402

from sparse_bridge.export import ExportError, evaluate, export_onnx  # noqa: E402

from .test_onnx_file import encoder, inputs, scene  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
helper, types = onnx.helper, onnx.TensorProto


@pytest.fixture(scope="module")
def files():
    """A file of every kind of node, in both forms, and inputs for it."""
    with apis.standin() as sp:
        net, x = encoder(sp), scene(sp)
        return {
            "now": export_onnx(net, x),
            "older": export_onnx(net, x, legacy=True),
            "half": export_onnx(net, x, dtype=torch.float16),
            "inputs": inputs(x),
        }


def input_through(kind, slot, op, **attributes):
    """Read an input of the first node of a kind through another node."""

    def spoil(proto):
        nodes = proto.graph.node
        index = next(i for i, node in enumerate(nodes) if node.op_type == kind)
        more = [
            helper.make_node("Constant", [], [f"spoilt_{name}"], value_ints=value)
            for name, value in attributes.items()
            if isinstance(value, list)
        ]
        kept = {k: v for k, v in attributes.items() if not isinstance(v, list)}
        read = [nodes[index].input[slot], *(node.output[0] for node in more)]
        more.append(helper.make_node(op, read, ["spoilt"], **kept))
        nodes[index].input[slot] = "spoilt"
        for node in reversed(more):
            nodes.insert(index, node)

    return spoil


def attribute_as(kind, name, value):
    """Another value of an attribute of the first node of a kind; None: without it."""

    def spoil(proto):
        node = next(node for node in proto.graph.node if node.op_type == kind)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    return spoil


def count(kind, inputs=None, outputs=None):
    """Other numbers of inputs or outputs."""

    def spoil(proto):
        node = next(node for node in proto.graph.node if node.op_type == kind)
        if inputs is not None:
            values = [*node.input, *["features"] * 9][:inputs]
            del node.input[:]
            node.input.extend(values)
        if outputs is not None:
            values = [*node.output, *(f"more_{i}" for i in range(9))][:outputs]
            del node.output[:]
            node.output.extend(values)

    return spoil


def part(start, end, axis):
    return {"starts": [start], "ends": [end], "axes": [axis]}


TABLES, GEMM, LISTS, BY_LISTS = ("GetIndicePairsImplicitGemm", "ImplicitGemm", "GetIndicePairs", "IndiceConv")
SPOILT = {
    "coordinates of int64": (input_through(TABLES, 0, "Cast", to=types.INT64), "int64"),
    "three columns": (input_through(TABLES, 0, "Slice", **part(1, 4, 1)), "[N, 4]"),
    "tables: two inputs": (count(TABLES, inputs=2), "2 inputs"),
    "tables: four outputs": (count(TABLES, outputs=6), "6 outputs"),
    "no stride": (attribute_as(TABLES, "stride", None), "stride"),
    "two kernel sizes": (attribute_as(TABLES, "ksize", [3, 3]), "ksize"),
    "algo as a float": (attribute_as(TABLES, "algo", 1.0), "algo"),
    "do_sort as text": (attribute_as(TABLES, "do_sort", "yes"), "do_sort"),
    "four inputs": (count(GEMM, inputs=4), "4 inputs"),
    "seven inputs": (count(GEMM, inputs=7), "7 inputs"),
    "two outputs": (count(GEMM, outputs=2), "2 outputs"),
    "rows of float16": (input_through(GEMM, 0, "Cast", to=types.FLOAT16), "float16"),
    "rows of float64": (input_through(GEMM, 0, "Cast", to=types.DOUBLE), "float64"),
    "rows of few channels": (input_through(GEMM, 0, "Slice", **part(0, 3, 1)), "C = 3"),
    "weight of four axes": (input_through(GEMM, 1, "Reshape", shape=[8, 27, 4, 1]), "weight"),
    "weight of float16": (input_through(GEMM, 1, "Cast", to=types.FLOAT16), "float16"),
    "table of int64": (input_through(GEMM, 2, "Cast", to=types.INT64), "int64"),
    "table of fewer rows": (input_through(GEMM, 2, "Slice", **part(0, 9, 1)), "M = 9"),
    "masks of one axis": (input_through(GEMM, 3, "Squeeze", axes=[1]), "masks"),
    "order of two axes": (input_through(GEMM, 4, "Unsqueeze", axes=[1]), "row order"),
    "bias of float16": (input_through(GEMM, 5, "Cast", to=types.FLOAT16), "bias"),
    "bias of two axes": (input_through(GEMM, 5, "Unsqueeze", axes=[0]), "bias"),
    "bias of fewer channels": (input_through(GEMM, 5, "Slice", **part(0, 7, 0)), "K = 8"),
    "activation 4": (attribute_as(GEMM, "act_type", 4), "act_type is 4"),
    "activation -1": (attribute_as(GEMM, "act_type", -1), "act_type is -1"),
    "activation as a float": (attribute_as(GEMM, "act_type", 1.0), "act_type"),
    "no slope": (attribute_as(GEMM, "act_alpha", None), "act_alpha"),
    "slope as an integer": (attribute_as(GEMM, "act_alpha", 1), "act_alpha"),
    "lists that are not submanifold": (attribute_as(LISTS, "subm", 0), "subm is 0"),
    "lists: five outputs": (count(LISTS, outputs=5), "5 outputs"),
    "lists of int64": (input_through(BY_LISTS, 2, "Cast", to=types.INT64), "int64"),
    "lists of one half": (input_through(BY_LISTS, 2, "Slice", **part(0, 1, 0)), "[2, V, M]"),
    "counts of two axes": (input_through(BY_LISTS, 3, "Unsqueeze", axes=[0]), "pair counts"),
    "a bias for lists": (count(BY_LISTS, inputs=6), "6 inputs"),
    "no is_subm": (attribute_as(BY_LISTS, "is_subm", None), "is_subm"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_the_plugins_refuse_is_refused(files, name):
    spoil, message = SPOILT[name]
    proto = copy.deepcopy(files["now"])
    spoil(proto)
    with pytest.raises(ExportError) as caught:
        evaluate(proto, files["inputs"])
    assert message in str(caught.value)


@pytest.mark.parametrize("form", ["now", "older", "half"])
def test_what_is_written_is_taken(files, form):
    evaluate(files[form], files["inputs"])


@pytest.mark.parametrize("spoil", [attribute_as(TABLES, "do_sort", None), attribute_as(GEMM, "act_type", None)])
def test_older_nodes_are_read(files, spoil):
    """do_sort is 1 then, act_type 0."""
    proto = copy.deepcopy(files["now"])
    spoil(proto)
    evaluate(proto, files["inputs"])
