"""Running an exported file without TensorRT: onnx's reference evaluator, with our engine behind the
nodes of the domain `autoware`."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ShapeError
from . import nodes


def onnx_module() -> Any:
    """The package onnx. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ImportError(
            'exporting needs the package onnx: pip install "sparse-bridge[onnx]".'
        ) from error


def _tensor(array: Any) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _arrays(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor.numpy() for tensor in tensors)


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes by the names that torch.onnx writes them under."""
    return {f"{name}_i": value for name, value in given.items() if value is not None}


@functools.cache
def _operators() -> list[Any]:
    op_run = importlib.import_module("onnx.reference.op_run").OpRun

    class GetIndicePairsImplicitGemm(op_run):  # type: ignore[misc, valid-type]
        op_domain = nodes.DOMAIN

        def _run(self, indices: Any, **given: Any) -> tuple[Any, ...]:
            return _arrays(nodes.pair_tables(_tensor(indices), _attributes(given)))

    class GetIndicePairs(op_run):  # type: ignore[misc, valid-type]
        op_domain = nodes.DOMAIN

        def _run(self, indices: Any, **given: Any) -> tuple[Any, ...]:
            return _arrays(nodes.pair_lists(_tensor(indices), _attributes(given)))

    class ImplicitGemm(op_run):  # type: ignore[misc, valid-type]
        op_domain = nodes.DOMAIN

        def _run(
            self, features: Any, filters: Any, pair_fwd: Any, masks: Any, order: Any, **given: Any
        ) -> tuple[Any, ...]:
            table = _tensor(pair_fwd)
            _check_masks(table, _tensor(masks), _tensor(order))
            return _arrays([nodes.product_by_table(_tensor(features), _tensor(filters), table)])

    class IndiceConv(op_run):  # type: ignore[misc, valid-type]
        op_domain = nodes.DOMAIN

        def _run(
            self, features: Any, filters: Any, found: Any, counts: Any, n_out: Any,
            is_subm: Any = None,
        ) -> tuple[Any, ...]:  # fmt: skip
            x, lists = _tensor(features), (_tensor(found), _tensor(counts))
            made = nodes.product_by_lists(
                x, _tensor(filters), *lists, int(np.asarray(n_out)), bool(is_subm)
            )
            return _arrays([made])

    return [GetIndicePairsImplicitGemm, GetIndicePairs, ImplicitGemm, IndiceConv]


def _check_masks(table: torch.Tensor, masks: torch.Tensor, order: torch.Tensor) -> None:
    """The plugin reads masks and order where we read the table: they must say the same."""
    bits = torch.zeros(table.shape[1], dtype=torch.int64)
    for v, column in enumerate(table):
        bits |= (column >= 0).long() << v
    every = torch.arange(table.shape[1])
    if not torch.equal(masks[:, 0].long() & 0xFFFFFFFF, bits) or not torch.equal(
        order.long().sort().values, every
    ):
        raise ShapeError("ImplicitGemm: masks or order of rows do not belong to its pair table.")


def evaluate(file: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of an exported file, on the CPU.

    file: path, or an onnx.ModelProto.  inputs: tensors by the names of the file's inputs.
    """
    onnx_module()
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    source = os.fspath(file) if isinstance(file, (str, os.PathLike)) else file
    session = evaluator(source, new_ops=_operators())
    missing = set(session.input_names) - set(inputs)
    if missing:
        raise ShapeError(f"inputs missing: {sorted(missing)}; got {sorted(inputs)}.")
    arrays = {name: inputs[name].detach().cpu().numpy() for name in session.input_names}
    return [_tensor(array) for array in session.run(None, arrays)]
