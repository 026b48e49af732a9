"""What the tensors of a relational convolution must be, and the graph that it follows."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ...errors import CoordinateError, DataTypeError, DeviceError, ShapeError, UnsupportedError
from ..arguments import expect_tensors
from ..conv.checks import FLOATS, check_like_result
from ..conv.convolution import autocast_dtype
from ..traced import between_graphs

INTEGERS = (torch.int32, torch.int64)
_MOST = 1 << 31  # nodes and relations: their product fits into int64


def size_of(value: Any, name: str, least: int | None = None) -> int:
    """`value` as an int. Raises: ShapeError for what is no integer, or is below `least`."""
    try:
        size = operator.index(value)
    except TypeError:
        raise ShapeError(f"{name} is {value!r}; expected an integer.") from None
    if least is not None and size < least:
        raise ShapeError(f"{name} is {size}; expected {least} or more.")
    return size


def check_edges(edge_index: torch.Tensor, edge_type: torch.Tensor) -> None:
    """Check that edges are int32 or int64 [2, E] and their relations [E], dense and on one device.

    Raises: DataTypeError, ShapeError, UnsupportedError, DeviceError.
    """
    for name, tensor in (("edge_index", edge_index), ("edge_type", edge_type)):
        expect_tensors("relation_map", **{name: tensor})
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ShapeError(f"edge_index has shape {list(edge_index.shape)}; expected [2, E].")
    if edge_type.shape != edge_index.shape[1:]:
        raise ShapeError(
            f"edge_type has shape {list(edge_type.shape)}; expected [{edge_index.shape[1]}], one "
            "relation for every edge."
        )
    for name, tensor in (("edge_index", edge_index), ("edge_type", edge_type)):
        if tensor.dtype not in INTEGERS:
            raise DataTypeError(f"{name} is {tensor.dtype}; expected int32 or int64.")
        _check_dense(tensor, name)
        if tensor.is_meta:
            raise DeviceError(f"{name} is on the meta device; a relation map needs its values.")
    if edge_index.device != edge_type.device:
        raise DeviceError(
            f"edge_index is on {edge_index.device}, edge_type on {edge_type.device}; move both to one device."
        )


def check_counts(n_in: Any, n_out: Any, n_relations: Any) -> tuple[int, int, int]:
    """The three as ints; n_in None: n_out. Raises: ShapeError for what is no integer, for negative nodes, for less than
    one relation, and for 2^31 or more of any."""
    n_out, n_relations = size_of(n_out, "n_out"), size_of(n_relations, "n_relations")
    n_in = n_out if n_in is None else size_of(n_in, "n_in")
    if min(n_in, n_out) < 0 or n_relations < 1 or max(n_in, n_out, n_relations) >= _MOST:
        raise ShapeError(
            f"{n_in} source nodes, {n_out} target nodes and {n_relations} relations; expected "
            "fewer than 2^31 of each, and at least one relation."
        )
    return n_in, n_out, n_relations


def check_nodes(nodes: torch.Tensor, name: str) -> None:
    """Check that nodes are dense features [N, C], fp16 / bf16 / fp32 / fp64, or numbers int32 / int64 [N].

    Raises: DataTypeError, ShapeError, UnsupportedError.
    """
    expect_tensors("the layer", **{name: nodes})
    is_numbers = nodes.dtype in INTEGERS
    if not is_numbers and nodes.dtype not in FLOATS:
        raise DataTypeError(
            f"{name} is {nodes.dtype}; expected features in fp16, bf16, fp32 or fp64 (use .float()), or numbers of "
            "nodes in int32 or int64 (use .long())."
        )
    _check_dense(nodes, name)
    if nodes.ndim != (1 if is_numbers else 2):
        what = "[N], the numbers of nodes; features are floats" if is_numbers else "[N, C_in]"
        raise ShapeError(f"{name} has shape {list(nodes.shape)} and is {nodes.dtype}; expected {what}.")


def _check_dense(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{name} is a tensor of layout {tensor.layout}; expected a dense one (use .to_dense()).")


@between_graphs
def number_bounds(numbers: torch.Tensor) -> tuple[int, int]:
    """The least and the largest of node numbers int [N], on the host, in one wait for the device; (0, -1) for none."""
    if not len(numbers):
        return 0, -1
    least, most = torch.stack(numbers.aminmax()).tolist()
    return least, most


def check_numbers(numbers: torch.Tensor, n_table: int, name: str) -> None:
    """CoordinateError unless 0 <= number < n_table for node numbers int [N]. Waits for the device."""
    least, most = number_bounds(numbers)
    if least < 0 or most >= n_table:
        raise CoordinateError(f"{name} names node {least if least < 0 else most}; expected 0 <= node < {n_table}.")


def check_operands(x: torch.Tensor, weight: torch.Tensor, relations: Any) -> torch.dtype:
    """The dtype of the result, once x (see `check_nodes`), the weight and the `RelationMap` fit together.

    Raises: ShapeError, DataTypeError, DeviceError, UnsupportedError.
    """
    expect_tensors("relational_conv", weight=weight)
    n_in, n_relations, device = relations.n_in, relations.n_relations, relations.device
    shape = weight.shape
    if len(shape) not in (3, 4) or shape[0] != n_relations:
        raise ShapeError(
            f"the weight has shape {list(weight.shape)}; expected [{n_relations}, C_in, "
            "C_out], or [R, blocks, C_in / blocks, C_out / blocks]."
        )
    if x.device != device or weight.device != device:
        raise DeviceError(
            f"x is on {x.device}, the weight on {weight.device}, the edges on {device}; move them all to one device."
        )
    autocast = autocast_dtype(device)
    if x.dtype in INTEGERS:
        if len(shape) == 4:
            raise UnsupportedError("a block-diagonal weight takes features, not the numbers of nodes.")
        if weight.dtype not in FLOATS:
            raise DataTypeError(f"the weight is {weight.dtype}; expected one of fp16, bf16, fp32, fp64.")
        if x.shape[0] != n_in:
            raise ShapeError(f"x has shape {list(x.shape)}; expected [{n_in}].")
        dtype = weight.dtype
    else:
        rows, channels = x.shape
        if rows != n_in:
            raise ShapeError(f"x has shape {list(x.shape)}; expected [{n_in}, C_in].")
        c_in = shape[1] if len(shape) == 3 else shape[1] * shape[2]
        if channels != c_in:
            raise ShapeError(f"x has {channels} channels, the weight expects {c_in}.")
        check_dtypes(x, weight, "x", "the weight")
        dtype = x.dtype
    return dtype if autocast is None or dtype == torch.float64 else autocast


def check_dtypes(x: torch.Tensor, matrix: torch.Tensor, name: str, matrix_name: str) -> None:
    """DataTypeError unless features and the matrix that they meet are of one dtype, or become so under autocast."""
    if x.dtype == matrix.dtype:
        return
    if autocast_dtype(x.device) is None or torch.float64 in (x.dtype, matrix.dtype) or matrix.dtype not in FLOATS:
        raise DataTypeError(
            f"{name} is {x.dtype} and {matrix_name} {matrix.dtype}; convert one, or use torch.autocast (but for fp64)."
        )


def check_residual(residual: torch.Tensor, n_out: int, c_out: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check that a residual is [n_out, c_out], on the device of the result and of its dtype, or becomes so under
    autocast. Raises: ShapeError, DataTypeError, DeviceError."""
    casts = autocast_dtype(device) is not None and residual.dtype in FLOATS
    casts &= torch.float64 not in (residual.dtype, dtype)
    check_like_result(residual, (n_out, c_out), residual.dtype if casts else dtype, device)
