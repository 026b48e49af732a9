"""Writing a network as a folder that a C++ program loads, without Python: AOTInductor's package,
the source of sparse_bridge's operators, an example, and recorded scenes."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.device.torch_compat import RELEASE
from ..errors import UnsupportedError
from . import package_check, package_scenes
from .package_scenes import Scene
from .plugin_checks import ExportError

OLDEST = (2, 11)  # torch whose stable ABI has tensors that own what they stand for
SOURCES = pathlib.Path(__file__).with_name("cpp")
OPERATORS = frozenset(
    f"sparse_bridge::{name}"
    for name in ("coordinates", "map", "new_map", "conv", "conv_fused", "pool", "global_pool", "to_dense")
)
_FRAMEWORK = "spconv"  # whose maps `operators/maps.cpp` builds
_DATAFLOWS = ("", "auto", "per_offset")
_POOLS = ("max", "avg", "sum")


def export_package(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    scenes: Sequence[Sequence[torch.Tensor]] = (),
    dynamic_shapes: Any = None,
    verify: bool = False,
) -> pathlib.Path:
    """Write a network of spconv layers as a folder for C++ programs on the CPU.

    model: in eval mode; takes tensors and returns tensors, perhaps in tuples, lists and
        dictionaries.
    inputs: of one scene, with two rows or more; on the CPU.
    folder: what it holds is replaced by name; made where it is not there.
    scenes: inputs of further scenes to record. Without any, half of the rows of `inputs`.
    dynamic_shapes: as of `torch.export.export`. By default the first dimension of every input may
        have any size; inputs of the same size share it.
    verify: build the example with CMake and run it on the recorded scenes.
    Returns the folder.
    Raises: ExportError where the model, torch or the recorded scenes do not fit.
    """
    _check_torch()
    inputs = _checked(model, inputs, "inputs")
    others = [_checked(model, scene, f"scenes[{i}]") for i, scene in enumerate(scenes)]
    if dynamic_shapes is None:
        dynamic_shapes = _any_rows(model, inputs)
        others = others or [package_scenes.half_of(inputs)]
    for i, scene in enumerate(others):
        if len(scene) != len(inputs):
            raise ExportError(f"scenes[{i}] has {len(scene)} inputs; expected {len(inputs)}.")
    program = _traced(model, inputs, dynamic_shapes)
    _check_operators(program)
    folder = pathlib.Path(folder)
    # With the time of now: CMake builds again what an older package left in the folder.
    shutil.copytree(SOURCES, folder, copy_function=shutil.copy, dirs_exist_ok=True)
    package_scenes.record(model, [inputs, *others], folder)
    compile_graph(program, folder / "model.pt2")
    if verify:
        package_check.check(folder)
    return folder


def _check_torch() -> None:
    headers = pathlib.Path(torch.__path__[0], "include", "torch", "csrc", "stable", "ops.h")
    if RELEASE < OLDEST or not headers.is_file():
        raise ExportError(
            f"torch {torch.__version__} has no stable ABI that packages can be built with; install "
            f"torch {'.'.join(map(str, OLDEST))} or newer, with its headers."
        )


def _checked(model: nn.Module, inputs: Sequence[torch.Tensor], name: str) -> Scene:
    if not isinstance(model, nn.Module):
        raise ExportError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    if not isinstance(inputs, (list, tuple)):
        raise ExportError(f"{name} is a {type(inputs).__name__}; expected a tuple of tensors.")
    if model.training:
        raise ExportError("the model is in training mode; packages are for inference: model.eval().")
    for i, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise ExportError(
                f"{name}[{i}] is a {type(tensor).__name__}; expected tensors. Have the model build "
                "its SparseConvTensor, of features and indices."
            )
        if tensor.device.type != "cpu":
            raise ExportError(
                f"{name}[{i}] is on {tensor.device}; packages are for the CPU: move model and "
                "inputs there. On a GPU use torch.export and Python (docs/compile.md)."
            )
    return tuple(inputs)


def _any_rows(model: nn.Module, inputs: Scene) -> tuple[Any, ...]:
    rows: dict[int, Any] = {}
    for tensor in inputs:
        if tensor.dim() and len(tensor) < 2:
            raise ExportError(
                f"an input of shape {list(tensor.shape)}: a size below 2 is taken for a constant. "
                "Give a scene of two rows or more, or say which sizes vary in dynamic_shapes."
            )
        if tensor.dim():
            rows.setdefault(len(tensor), torch.export.Dim(f"rows_{len(rows)}", min=2))
    dims = [{0: rows[len(tensor)]} if tensor.dim() else {} for tensor in inputs]
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # which takes the other inputs as one
        named = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        return (*dims[:named], tuple(dims[named:]))
    return tuple(dims)


def _traced(model: nn.Module, inputs: Scene, dynamic_shapes: Any) -> Any:
    from .. import compile as operators  # noqa: F401 - registers them

    printed = io.StringIO()  # in front of an error torch prints the graph so far
    try:
        with torch.no_grad():
            package_scenes.tensors_of(model(*inputs))
            with contextlib.redirect_stderr(printed):
                program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise _refused("torch.export does not take the model", error) from error
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        raise _refused("the model's Python code decides by data", error) from error
    sys.stderr.write(printed.getvalue())
    return program


def _refused(problem: str, error: Exception) -> ExportError:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ExportError(
        f"{problem}: {first.rstrip('.')}. Trace it with torch.export.export first (docs/compile.md), whose message "
        "is whole, or package the part of the model that it takes."
    )


def _check_operators(program: Any) -> None:
    """Raises ExportError for operators, maps and dataflows that packages do not hold."""
    from ..compile import needed

    missing = sorted(set(needed(program)) - OPERATORS)
    if missing:
        raise ExportError(
            f"the model calls {', '.join(missing)}, which packages do not hold: they have the "
            "convolutions, pools and dense grids of spconv. Package the part of the model without "
            "them, or load torch.export's program in Python (docs/compile.md)."
        )
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _check_call(node.target._schema, node.args, node.kwargs)


def _check_call(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    names = [argument.name for argument in schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if not schema.name.startswith("sparse_bridge::"):
        return
    if arguments.get("builder", _FRAMEWORK) != _FRAMEWORK:
        raise ExportError(
            f"the model asks for maps of {arguments['builder']}; packages hold those of {_FRAMEWORK}'s "
            "layers. Load torch.export's program in Python (docs/compile.md)."
        )
    if arguments.get("dataflow", "") not in _DATAFLOWS:
        raise ExportError(
            f"a layer is forced to the dataflow {arguments['dataflow']}; packages compute per_offset. "
            "Package the model without sparse_bridge.dataflow()."
        )
    if arguments.get("mode", "max") not in _POOLS:
        raise ExportError(
            f"a pool of mode {arguments['mode']!r}; packages hold {', '.join(_POOLS)}. Package the "
            "part of the model without it."
        )


def compile_graph(program: Any, path: pathlib.Path) -> None:
    from torch._inductor import aoti_compile_and_package, exc

    try:
        aoti_compile_and_package(program, package_path=str(path))
    except (exc.InvalidCxxCompiler, exc.InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", error), exc.InvalidCxxCompiler):
            raise
        raise UnsupportedError(
            "AOTInductor finds no C++ compiler; install g++ or clang++, or set CXX to one."
        ) from error
