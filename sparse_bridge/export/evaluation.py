"""Running an exported file without TensorRT: onnx's reference evaluator, with our engine behind the
nodes of the domain `autoware`, which are checked as the plugins check them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import DataTypeError, ShapeError
from . import nodes
from .graph import onnx_module
from .plugin_checks import check
from .rulebooks import load, plan_of


def _tensor(array: Any) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _arrays(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor.numpy() for tensor in tensors)


def _pair_tables(indices: Any, **attributes: Any) -> Any:
    return nodes.pair_tables(indices, nodes.torch_names(attributes))


def _pair_lists(indices: Any, **attributes: Any) -> Any:
    return nodes.pair_lists(indices, nodes.torch_names(attributes))


def _product_by_table(
    features: Any,
    filters: Any,
    table: Any,
    masks: Any,
    order: Any,
    bias: Any = None,
    *,
    act_type: int | None = None,
    act_alpha: float | None = None,
    **_: Any,
) -> Any:
    _check_masks(table, masks, order)
    activation, alpha = act_type or 0, act_alpha or 0.0
    return [nodes.product_by_table(features, filters, table, bias, activation, alpha)]


def _product_by_lists(
    features: Any, filters: Any, lists: Any, counts: Any, n_out: Any, *, is_subm: int | None = None, **_: Any
) -> Any:
    rows = int(n_out)
    return [nodes.product_by_lists(features, filters, lists, counts, rows, bool(is_subm))]


_COMPUTE: dict[str, Callable[..., Any]] = {
    "GetIndicePairsImplicitGemm": _pair_tables,
    "GetIndicePairs": _pair_lists,
    "ImplicitGemm": _product_by_table,
    "IndiceConv": _product_by_lists,
}


@functools.cache
def _operators() -> list[Any]:
    """A class of onnx's evaluator for each node of the domain `autoware`."""
    base = importlib.import_module("onnx.reference.op_run").OpRun
    helper = onnx_module().helper
    type_name = onnx_module().AttributeProto.AttributeType.Name

    def run(self: Any, *inputs: Any, **values: Any) -> tuple[Any, ...]:
        node = self.onnx_node
        attributes = {
            attribute.name: (type_name(attribute.type), helper.get_attribute_value(attribute))
            for attribute in node.attribute
        }
        present = [np.asarray(value) for value in inputs if value is not None]
        check(node.op_type, attributes, present, len(node.output))
        return _arrays(_COMPUTE[node.op_type](*map(_tensor, present), **values))

    return [type(op_type, (base,), {"op_domain": nodes.DOMAIN, "_run": run}) for op_type in _COMPUTE]


def _check_masks(table: torch.Tensor, masks: torch.Tensor, order: torch.Tensor) -> None:
    """The plugin reads masks and order where we read the table: they must say the same."""
    bits = torch.zeros(table.shape[1], dtype=torch.int64)
    for v, column in enumerate(table):
        bits |= (column >= 0).long() << v
    every = torch.arange(table.shape[1])
    if not torch.equal(masks[:, 0].long() & 0xFFFFFFFF, bits) or not torch.equal(order.long().sort().values, every):
        raise ShapeError("ImplicitGemm: masks or order of rows do not belong to its pair table.")


def evaluate(file: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of an exported file, on the CPU. It may be of the older form, too, or another's.

    file: path, or an onnx.ModelProto.  inputs: tensors or arrays by the names of the file's inputs;
    others are left aside. `rulebook_inputs` gives those that follow from coordinates.

    Raises ExportError for nodes that Autoware's plugins would refuse; ShapeError, DataTypeError for
    inputs that are missing or not as declared.
    """
    onnx_module()
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    proto = load(file)
    if not isinstance(inputs, Mapping):
        raise DataTypeError(
            f"inputs are a {type(inputs).__name__}; expected tensors by the names of the file's inputs."
        )
    session = evaluator(proto, new_ops=_operators())
    missing = set(session.input_names) - set(inputs)
    if missing:
        hint = "" if plan_of(proto) is None else " rulebook_inputs(file, indices) gives tables."
        raise ShapeError(f"inputs missing: {sorted(missing)}; got {sorted(inputs)}.{hint}")
    arrays: dict[str, Any] = {}
    sizes: dict[str, tuple[str, int]] = {}
    for value in proto.graph.input:
        if value.name in session.input_names:
            arrays[value.name] = torch.as_tensor(inputs[value.name]).detach().cpu().numpy()
            _check_input(value, arrays[value.name], sizes)
    return [_tensor(array) for array in session.run(None, arrays)]


def _check_input(value: Any, array: Any, named: dict[str, tuple[str, int]]) -> None:
    """An input has the dtype, rank and fixed sizes that the file declares; sizes of one name are
    alike in all inputs, which TensorRT asks for, too.

    named: the input that had each name first, and its size.
    """
    declared = value.type.tensor_type
    dtype = onnx_module().helper.tensor_dtype_to_np_dtype(declared.elem_type)
    if array.dtype != dtype:
        raise DataTypeError(f"input {value.name!r} is {array.dtype}; the file takes {dtype}.")
    if not declared.HasField("shape"):
        return
    sizes = [dim.dim_value or dim.dim_param for dim in declared.shape.dim]
    if len(sizes) != array.ndim or any(
        isinstance(size, int) and size != got for size, got in zip(sizes, array.shape, strict=True)
    ):
        raise ShapeError(f"input {value.name!r} is {list(array.shape)}; the file takes {sizes}.")
    for size, got in zip(sizes, array.shape, strict=True):
        if isinstance(size, str) and size:
            other, first_size = named.setdefault(size, (value.name, got))
            if first_size != got:
                raise ShapeError(
                    f"input {value.name!r} is {list(array.shape)}; the file takes {sizes}, and {size} is "
                    f"{first_size} in {other!r}. Give inputs of one scene."
                )
