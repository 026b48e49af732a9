"""Writing a network of spconv layers as an ONNX file."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import tolerances
from ..errors import DataTypeError, SettingError, SparseBridgeError, require_type
from . import folding, half, nodes
from . import rulebooks as pair_tables
from .evaluation import evaluate
from .graph import Graph, onnx_module
from .plugin_checks import ExportError
from .tracing import as_in_files, exporting


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
            tensor_class, shape, batch_size = (type(self._like), self._like.spatial_shape, self._like.batch_size)
            result = self.model(tensor_class(args[0], args[1], list(shape), int(batch_size)))
        named = list(_named(result, ""))
        self.names = [name for name, _ in named]
        return tuple(tensor for _, tensor in named)


def export_onnx(
    model: nn.Module,
    args: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    opset: int = 17,
    do_sort: bool = False,
    dtype: torch.dtype = torch.float32,
    rulebooks: str = "nodes",
    legacy: bool = False,
    verify: bool = False,
) -> Any:
    """Trace `model` and write it with the nodes of Autoware's TensorRT plugins.

    model: in eval mode, float32; its convolutions are 3-dimensional submanifold or strided layers
        of spconv (real or stand-in).
    args: a SparseConvTensor, which becomes the inputs `features` [N, C] and `indices` int32 [N, 4]
        with a free number of rows; or a tuple of tensors, which `model` takes.
    path: file to write; None writes none.
    input_names, output_names, dynamic_axes: as in torch.onnx.export.
    do_sort: whether the plugins sort rows by their masks.
    dtype: float16: features and weights of sparse layers in the file; inputs and outputs stay
        float32.
    rulebooks: "inputs": pair tables are inputs of the file, which `rulebook_inputs` computes from
        coordinates; "nodes": nodes of the file build them.
    legacy: write what plugins of before 2026 take: norms and activations as nodes of their own,
        no `do_sort`.
    verify: evaluate the file on `args`, and for a sparse tensor on every second row of it too;
        raise ExportError where it does not give the model's result.

    Returns the onnx.ModelProto. Batch size and grid are fixed in the file.
    Raises ExportError for what the nodes cannot express and for what torch.onnx does not trace,
    DataTypeError for other models and `args`, SettingError for an unknown `dtype` or `rulebooks` and for names
    that do not fit, ImportError without the package onnx.
    """
    require_type("export_onnx()", model, nn.Module, "a torch.nn.Module")
    onnx = onnx_module()
    _check(model, dtype, rulebooks)
    sparse = args if _is_sparse(args) else None
    inputs = (sparse.features, sparse.indices) if sparse is not None else _tensors(args)
    names = list(
        input_names or (["features", "indices"] if sparse is not None else [f"input_{i}" for i in range(len(inputs))])
    )
    if len(names) != len(inputs):
        raise SettingError(f"input_names {names}; expected one for each of {len(inputs)} inputs.")
    axes = dict(dynamic_axes or {})
    if sparse is not None and dynamic_axes is None:
        axes = {name: {0: "voxels_num"} for name in names}
    flat = _Flat(model, sparse).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: sizes that are fixed on purpose
        with as_in_files(model):
            want = flat(*inputs)
        outputs = [*(output_names or ()), *flat.names[len(output_names or ()) :]]
        if len(outputs) != len(flat.names):
            raise SettingError(f"output_names {outputs}; the network has {len(flat.names)} outputs: {flat.names}.")
        buffer = io.BytesIO()
        with exporting(do_sort, legacy), _tracing():
            torch.onnx.export(
                flat,
                inputs,
                buffer,  # type: ignore[arg-type]  # files in memory are taken, too
                input_names=names,
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=opset,
                custom_opsets={nodes.DOMAIN: 1},
                **_traced_exporter(),
            )
    proto = onnx.load_from_string(buffer.getvalue())
    _rewrite(Graph(proto), dtype, rulebooks, legacy)
    if verify:
        _compare(proto, dict(zip(names, inputs, strict=True)), want, outputs, dtype)
        if sparse is not None and len(inputs[1]) > 1:  # sizes must not be fixed either
            fewer = tuple(part[1::2].contiguous() for part in inputs)
            with torch.no_grad(), as_in_files(model):
                want = flat(*fewer)
            _compare(proto, dict(zip(names, fewer, strict=True)), want, outputs, dtype)
    if path is not None:
        onnx.save(proto, os.fspath(path))
    return proto


def _check(model: nn.Module, dtype: torch.dtype, rulebooks: str) -> None:
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        part = f"{training[0]}, a part of the network," if training[0] else "the network"
        raise ExportError(f"{part} is in training mode; call .eval() first.")
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_mean is None:
            raise ExportError(
                f"{name or 'the norm'} normalises by the scene (track_running_stats=False); ONNX "
                "has no such norm of rows in eval mode."
            )
    if dtype not in (torch.float32, torch.float16):
        raise SettingError(f"dtype {dtype}; the plugins take torch.float32 and torch.float16.")
    if rulebooks not in ("nodes", "inputs"):
        raise SettingError(f'rulebooks {rulebooks!r}; expected "nodes" or "inputs".')


def _tensors(args: Any) -> tuple[torch.Tensor, ...]:
    if not isinstance(args, (list, tuple)):
        raise DataTypeError(f"args is a {type(args).__name__}; expected a SparseConvTensor or a tuple of tensors.")
    for index, argument in enumerate(args):
        if not isinstance(argument, torch.Tensor):
            raise DataTypeError(
                f"args[{index}] is a {type(argument).__name__}; expected tensors, or a SparseConvTensor alone."
            )
    return tuple(args)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """The network has run before: what fails now is the trace."""
    try:
        yield
    except SparseBridgeError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(
            f"the network runs, but torch.onnx does not trace it: {first.rstrip('.')}. The traceback above names the "
            "place; export the part of the network without it."
        ) from error


def _rewrite(graph: Graph, dtype: torch.dtype, rulebooks: str, legacy: bool) -> None:
    """What was traced, in the form that was asked for."""
    if not legacy:
        pair_tables.share(graph)
        folding.fold(graph)
    if dtype == torch.float16:
        half.to_half(graph)
    if rulebooks == "inputs":
        pair_tables.cut(graph)


def _traced_exporter() -> dict[str, Any]:
    """The exporter that traces: the newer one needs a translation of every node."""
    has_switch = "dynamo" in inspect.signature(torch.onnx.export).parameters
    return {"dynamo": False} if has_switch else {}


def _compare(
    proto: Any, inputs: dict[str, torch.Tensor], want: Sequence[torch.Tensor], names: list[str], dtype: torch.dtype
) -> None:
    """Raise ExportError unless the file gives these results: integers the same, floats within the
    limit for whole networks."""
    plan = pair_tables.plan_of(proto)
    if plan is not None and plan["maps"]:
        tables = pair_tables.rulebook_inputs(proto, inputs[plan["coordinates"]])
        inputs = {**inputs, **tables}
    for name, expected, got in zip(names, want, evaluate(proto, inputs), strict=True):
        fp32 = "fp32" if expected.device.type == "cpu" else "tf32"  # which GPUs may multiply in
        limit = tolerances.of("network", fp32 if dtype == torch.float32 else dtype).rms
        same = got.shape == expected.shape
        if same and not expected.is_floating_point():
            same = torch.equal(got, expected.cpu())
        elif same:
            wide = expected.cpu().double()
            error = (got.double() - wide).square().sum().sqrt()
            same = bool(error <= limit * wide.square().sum().sqrt())
        if not same:
            raise ExportError(
                f"output {name!r} of the file, {list(got.shape)}, is not the network's, "
                f"{list(expected.shape)}, by the limit {limit:g} of {dtype}; a value that depends "
                "on the input was probably fixed while the network was traced"
                + (", or leaves float16." if dtype == torch.float16 else ".")
            )
