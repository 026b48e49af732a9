"""Writing a network of spconv layers as an ONNX file."""

from __future__ import annotations

import inspect
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DataTypeError
from . import nodes
from .evaluation import evaluate, onnx_module
from .tracing import ExportError, as_in_files, exporting

__all__ = ["ExportError", "export_onnx"]


def _is_sparse(value: Any) -> bool:
    return hasattr(value, "indice_dict") and hasattr(value, "replace_feature")


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything in a result: a sparse tensor is two."""
    if isinstance(value, torch.Tensor):
        yield name or "output", value
    elif _is_sparse(value):
        yield f"{name or 'out'}_features", value.features
        yield f"{name or 'out'}_indices", value.indices
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _named(part, f"{name}_{index}" if name else f"output_{index}")
    elif value is not None:
        raise DataTypeError(
            f"the network returns {type(value).__name__} at {name or 'its top'}; expected tensors, "
            "sparse tensors, and lists, tuples or dictionaries of them."
        )


class _Flat(nn.Module):
    """The network on tensors: what torch.onnx can trace. `names` are those of its last outputs."""

    def __init__(self, model: nn.Module, like: Any) -> None:
        super().__init__()
        self.model = model
        self._like = like
        self.names: list[str] = []

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._like is None:
            result = self.model(*args)
        else:
            kind, shape, batch_size = (
                type(self._like),
                self._like.spatial_shape,
                self._like.batch_size,
            )
            result = self.model(kind(args[0], args[1], list(shape), int(batch_size)))
        found = list(_named(result, ""))
        self.names = [name for name, _ in found]
        return tuple(tensor for _, tensor in found)


def export_onnx(
    model: nn.Module, args: Any, path: str | os.PathLike[str] | None = None, *,
    input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None, opset: int = 17,
    do_sort: bool | None = None, verify: bool = False,
) -> Any:  # fmt: skip
    """Trace `model` and write it with the nodes of Autoware's TensorRT plugins.

    model: in eval mode, float32; its convolutions are 3-dimensional submanifold or strided layers
        of spconv (real or stand-in).
    args: a SparseConvTensor, which becomes the inputs `features` [N, C] and `indices` int32 [N, 4]
        with a free number of rows; or a tuple of tensors, which `model` takes.
    path: file to write; None writes none.
    input_names, output_names, dynamic_axes: as in torch.onnx.export.
    do_sort: an attribute that newer plugins read; left out by default.
    verify: evaluate the file on `args`, and for a sparse tensor on every second row of it too;
        raise ExportError where it does not give the model's result.

    Returns the onnx.ModelProto. Batch size and grid are fixed in the file.
    Raises ExportError for what the nodes cannot express, ImportError without the package onnx.
    """
    onnx = onnx_module()
    training = [name or "it" for name, module in model.named_modules() if module.training]
    if training:
        raise ExportError(f"the network is in training mode ({training[0]}); call .eval() first.")
    sparse = args if _is_sparse(args) else None
    inputs = (sparse.features, sparse.indices) if sparse is not None else tuple(args)
    names = list(input_names or (["features", "indices"] if sparse is not None else
                                 [f"input_{i}" for i in range(len(inputs))]))  # fmt: skip
    axes = dict(dynamic_axes or {})
    if sparse is not None and dynamic_axes is None:
        axes = {name: {0: "voxels_num"} for name in names}
    flat = _Flat(model, sparse).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: sizes that are fixed on purpose
        with as_in_files(model):
            want = flat(*inputs)
        outputs = list(output_names or flat.names)
        buffer = io.BytesIO()
        with exporting(do_sort):
            torch.onnx.export(
                flat, inputs, buffer,  # type: ignore[arg-type]  # files in memory are taken, too
                input_names=names, output_names=outputs, dynamic_axes=axes,
                opset_version=opset, custom_opsets={nodes.DOMAIN: 1}, **_traced_exporter(),
            )  # fmt: skip
    proto = onnx.load_from_string(buffer.getvalue())
    if verify:
        _compare(proto, dict(zip(names, inputs, strict=True)), want, outputs)
        if sparse is not None and len(inputs[1]) > 1:  # sizes must not be fixed either
            fewer = tuple(part[1::2].contiguous() for part in inputs)
            with torch.no_grad(), as_in_files(model):
                want = flat(*fewer)
            _compare(proto, dict(zip(names, fewer, strict=True)), want, outputs)
    if path is not None:
        onnx.save(proto, os.fspath(path))
    return proto


def _traced_exporter() -> dict[str, Any]:
    """The exporter that traces: the newer one needs a translation of every node."""
    known = "dynamo" in inspect.signature(torch.onnx.export).parameters
    return {"dynamo": False} if known else {}


def _compare(
    proto: Any, inputs: dict[str, torch.Tensor], want: Sequence[torch.Tensor], names: list[str]
) -> None:
    for name, expected, got in zip(names, want, evaluate(proto, inputs), strict=True):
        if got.shape != expected.shape or not torch.allclose(
            got.double(), expected.cpu().double(), rtol=1e-3, atol=1e-4
        ):
            raise ExportError(
                f"output {name!r} of the file, {list(got.shape)}, is not the network's, "
                f"{list(expected.shape)}; a value that depends on the input was probably fixed "
                "while the network was traced."
            )
