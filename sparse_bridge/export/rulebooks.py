"""Nodes that build pair tables: one per set of sites and geometry, or none at all.

Tables are a function of coordinates alone, so that they can be inputs of the file. What builds them
is then kept as JSON in the file's metadata.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from ..errors import DataTypeError, ShapeError
from . import nodes
from .graph import Graph, onnx_module
from .plugin_checks import RULES, ExportError

METADATA = "sparse_bridge.rulebooks"
_LABELS = {
    "GetIndicePairsImplicitGemm": ("indices", "pair_fwd", "pair_mask", "mask_argsort", "voxels_num"),
    "GetIndicePairs": ("indices", "pairs", "pair_num", "voxels_num"),
}


def _map_nodes(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if n.domain == nodes.DOMAIN and n.op_type in _LABELS]


def _attributes(graph: Graph, node: Any) -> dict[str, Any]:
    value = graph.onnx.helper.get_attribute_value
    return {attribute.name: value(attribute) for attribute in node.attribute}


def share(graph: Graph) -> None:
    """Layers of one geometry on one set of sites read one node, whatever their keys.

    Sites of submanifold layers are their inputs'; their stride and padding play no part.
    """
    firsts: dict[str, Any] = {}
    for node in _map_nodes(graph):
        attributes = _attributes(graph, node)
        if attributes["subm"]:
            graph.replace(node.output[0], node.input[0])
            for name in ("stride", "padding", "out_padding"):
                del attributes[name]
        key = json.dumps([node.op_type, node.input[0], attributes], sort_keys=True)
        first = firsts.setdefault(key, node)
        if first is not node:
            for mine, other in zip(node.output, first.output, strict=True):
                graph.replace(mine, other)
    graph.prune()


def _source(graph: Graph, name: str, sites: set[str]) -> str:
    """Where coordinates come from, past nodes that change nothing: an input of the file, or sites
    of an earlier map."""
    int32 = graph.onnx.TensorProto.INT32
    inputs = {v.name for v in graph.graph.input if v.type.tensor_type.elem_type == int32}
    if name in sites or name in inputs:
        return name
    maker = graph.maker(name)
    if maker is not None and maker.op_type in ("Cast", "Identity"):
        return _source(graph, maker.input[0], sites)
    raise ExportError(
        'rulebooks="inputs" needs a network whose coordinates are an input of the file; this one '
        f"computes {name!r}. Pass them to the network as int32 [N, 4]: batch, z, y, x."
    )


def cut(graph: Graph) -> None:
    """Make inputs of what nodes build pair tables, and note in the metadata how."""
    maps: list[dict[str, Any]] = []
    sites: set[str] = set()
    for number, node in enumerate(_map_nodes(graph)):
        source = _source(graph, node.input[0], sites)
        names = [graph.free_name(f"map{number}_{label}") for label in _LABELS[node.op_type]]
        attributes = _attributes(graph, node)
        if attributes["subm"]:
            names[0] = source
        else:
            sites.add(names[0])
        maps.append({"op": node.op_type, "coordinates": source, "outputs": names, "attributes": attributes})
        for old, new in zip(node.output, names, strict=True):
            graph.replace(old, new)
        _declare(graph, maps[-1], number)
    graph.prune()
    _drop_unread(graph, {name for entry in maps for name in [entry["coordinates"], *entry["outputs"]]})
    roots = {entry["coordinates"] for entry in maps} - sites
    if len(roots) > 1:
        raise ExportError(f'rulebooks="inputs" takes one set of coordinates; this network has {sorted(roots)}.')
    plan = {"coordinates": next(iter(roots), None), "maps": maps}
    graph.onnx.helper.set_model_props(
        graph.proto, {**{p.key: p.value for p in graph.proto.metadata_props}, METADATA: json.dumps(plan)}
    )


def _declare(graph: Graph, entry: dict[str, Any], number: int) -> None:
    """Inputs of the file for what a map gives. Sizes are those that its plugin declares."""
    volume = 1
    for size in entry["attributes"]["ksize"]:
        volume *= size
    rows: Any = f"map{number}_rows"
    if entry["attributes"]["subm"]:
        source = next(v for v in graph.graph.input if v.name == entry["coordinates"])
        first = source.type.tensor_type.shape.dim[0]
        rows = first.dim_param or first.dim_value
    sizes = {"V": volume, "M": rows, "N": rows}
    int32 = graph.onnx.TensorProto.INT32
    present = {value.name for value in graph.graph.input}
    for name, value in zip(entry["outputs"], RULES[entry["op"]].outputs, strict=True):
        if name not in present:
            dims = [int(d) if d.isdigit() else sizes[d] for d in value.dims.split()]
            graph.graph.input.append(graph.onnx.helper.make_tensor_value_info(name, int32, dims))


def _drop_unread(graph: Graph, names: set[str]) -> None:
    """Remove inputs of these names that nothing reads."""
    for value in [value for value in graph.graph.input if value.name in names]:
        if not graph.users(value.name) and value.name not in graph.outputs:
            graph.graph.input.remove(value)


def plan_of(proto: Any) -> dict[str, Any] | None:
    """How the inputs of a file that has no nodes for it follow from coordinates."""
    text = {prop.key: prop.value for prop in proto.metadata_props}.get(METADATA)
    return None if text is None else json.loads(text)


def load(file: Any) -> Any:
    """onnx.ModelProto of a path, or itself. Raises ExportError for what is no ONNX file."""
    if not isinstance(file, (str, os.PathLike)):
        if isinstance(file, onnx_module().ModelProto):
            return file
        raise ExportError(f"{type(file).__name__} is no file; expected a path or an onnx.ModelProto.")
    try:
        return onnx_module().load(os.fspath(file))
    except OSError:
        raise
    except Exception as error:  # of whichever protobuf is installed
        raise ExportError(f"{os.fspath(file)} is no ONNX file: {error}") from error


def rulebook_inputs(file: Any, indices: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs that follow from coordinates, of a file written with `rulebooks="inputs"`.

    file: path, or the onnx.ModelProto.  indices: int32 [N, 4] (batch, z, y, x), on any device.

    Returns tensors on that device by the names of the file's inputs. They hold for every scene with
    these rows, in this order.
    """
    proto = load(file)
    plan = plan_of(proto)
    if plan is None:
        raise ExportError('the file builds its pair tables itself; export it with rulebooks="inputs".')
    if indices.dtype != torch.int32:
        raise DataTypeError(f"indices are {indices.dtype}; expected torch.int32.")
    if indices.ndim != 2 or indices.shape[1] != 4:
        raise ShapeError(f"indices are {list(indices.shape)}; expected [N, 4].")
    values = {plan["coordinates"]: indices}
    for entry in plan["maps"]:
        build = nodes.pair_tables if entry["op"] == "GetIndicePairsImplicitGemm" else nodes.pair_lists
        tables = build(values[entry["coordinates"]], nodes.torch_names(entry["attributes"]))
        values.update(zip(entry["outputs"], tables, strict=True))
    return {value.name: values[value.name] for value in proto.graph.input if value.name in values}
