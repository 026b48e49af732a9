"""What `python -m sparse_bridge package` does: write a network as a folder that a C++ program runs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import export
from ..errors import SettingError
from ..export import package_check
from ..names import meant
from ..tools.demo.voxels import street_voxels
<<<<<<< HEAD
from .warm_jobs import MODELS

_SUMMARY = "write a network as a folder that a C++ program runs without Python"
_TEXT = """\
Write a network as a folder that a program runs without Python. For the CPU, in C++: AOTInductor's
package, the source of the operators, an example with a CMake file, and recorded scenes. For GPUs,
with --target, in C: kernels, weights and the list of launches in one file, a player, an example.

  python -m sparse_bridge package second --out second --check
  python -m sparse_bridge package detector:make --out detector
  python -m sparse_bridge package detector:make --target cuda:87 --rows 150000 --out detector

MODEL is second or unet, with weights at random, or module:function. The function is called without
arguments and returns the model in eval mode and the inputs of a scene, or these and a list of the
inputs of further scenes. spconv is bridged before the module is imported."""

_ROWS = (20000, 5000)
_GPU_ROWS = 150000
_DTYPES = {"float32": torch.float32, "float16": torch.float16}
=======
from ..tools.harness.progress import Progress
from .program_frames import frames_of_program, show_program_alone
from .warm_names import MODELS
>>>>>>> main

Example = tuple[nn.Module, Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]]


<<<<<<< HEAD
def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `package` command; `args.func` becomes `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "package", help=_SUMMARY, description=_TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(MODELS)}, or module:function")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        help=f"voxels of the scenes of {' and '.join(MODELS)} (default: {' '.join(map(str, _ROWS))}); "
        f"with --target, the most rows of an input, for which memory is planned (default: {_GPU_ROWS})",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="GPU",
        help="write for this GPU, none of which is needed: cuda:87, hip:gfx942; may be given several times",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="with --target: cast model and features (default: as they are)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build the example with CMake, run it on the recorded scenes, and print its times",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Raises: SettingError for a model that is not there, ExportError for one that does not fit."""
    import sparse_bridge

    shipped = args.model in MODELS
    if args.target:
        return _for_gpus(args, shipped)
    if args.dtype:
        raise SettingError("--dtype is for packages with --target. Leave it out.")
    if args.rows and not shipped:
        raise SettingError(f"--rows is for {' and '.join(MODELS)}; {args.model} brings its own scenes. Leave it out.")
    rows = args.rows or _ROWS
    _check(args.out, rows)
    with sparse_bridge.enable("spconv"):
        network = _network(args.model, rows) if shipped else _own(args.model)
=======
def run(args: argparse.Namespace, rows: Sequence[int]) -> int:
    """Raises: SettingError for a model that is not there, ExportError for one that does not fit."""
    import sparse_bridge

    with Progress(1 + args.check) as progress, sparse_bridge.enable("spconv"):
        progress.start(f"make {args.model}")
        network = _network(args.model, rows) if args.model in MODELS else _own(args)
>>>>>>> main
        model, inputs, scenes = network
        progress.start(f"trace and compile {args.model}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's, of its own code
            export.export_package(model, inputs, args.out, scenes=scenes)
        progress.done()
        progress.start("build the example with CMake, run it")
        ran = package_check.check(args.out, repeat=5) if args.check else None
    if args.json:
        scenes_run = None if ran is None else [scene._asdict() for scene in ran]
        sys.stdout.write(json.dumps({"folder": str(args.out), "scenes": scenes_run}) + "\n")
        return 0
    sys.stdout.write(f"{args.out}: a package with operators, example and scenes, see README.md\n")
<<<<<<< HEAD
    _show(ran)
    return 0


def _check(out: pathlib.Path, rows: Sequence[int]) -> None:
    """Raises SettingError for what no package is made of."""
    if min(rows) < 2:
        raise SettingError(f"--rows {min(rows)}: expected 2 or more.")
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out {out}: got a file; expected a folder.")


def _for_gpus(args: argparse.Namespace, shipped: bool) -> int:
    """Write a package for GPUs, and say what it takes on each."""
    import sparse_bridge

    rows = args.rows or [_GPU_ROWS]
    _check(args.out, rows)
    if len(rows) > 1:
        raise SettingError(f"--rows {' '.join(map(str, rows))}: with --target expected one number, the most rows.")
    with sparse_bridge.enable("spconv"):
        scenes_of = [min(count, rows[0]) for count in _ROWS]
        model, inputs, scenes = _network(args.model, scenes_of) if shipped else _own(args.model)
        if args.dtype:
            model, dtype = model.to(_DTYPES[args.dtype]), _DTYPES[args.dtype]
            inputs, *scenes = [
                tuple(t.to(dtype) if t.is_floating_point() else t for t in scene) for scene in (inputs, *scenes)
            ]
        programs = export.export_gpu_package(model, inputs, args.out, targets=args.target, rows=rows[0], scenes=scenes)
    ran = package_check.check(args.out, repeat=5) if args.check else None
    facts = [
        {"target": p.target, "memory": p.memory, "steps": len(p.steps), "kernels": len(p.kernels)} for p in programs
    ]
    if args.json:
        found = None if ran is None else [scene._asdict() for scene in ran]
        sys.stdout.write(json.dumps({"folder": str(args.out), "targets": facts, "scenes": found}) + "\n")
        return 0
    sys.stdout.write(f"{args.out}: model.sbp with its player, an example and scenes, see README.md\n")
    for fact in facts:
        memory = int(str(fact["memory"])) / (1 << 20)
        steps, kernels = fact["steps"], fact["kernels"]
        sys.stdout.write(f"  {fact['target']}: {memory:.0f} MiB for {rows[0]} rows, {steps} steps, {kernels} kernels\n")
    _show(ran)
    return 0


def _show(ran: Sequence[package_check.Ran] | None) -> None:
    for rows, milliseconds, error in ran or ():
        sys.stdout.write(f"  {rows} rows: {milliseconds:.1f} ms, error {error:.1g} of the RMS\n")


def _own(name: str) -> Example:
=======
    for scene in ran or ():
        sys.stdout.write(f"  {scene.rows} rows: {scene.milliseconds:.1f} ms, error {scene.error:.1g} of the RMS\n")
    return 0


def _own(args: argparse.Namespace) -> Example:
>>>>>>> main
    """What module:function makes."""
    name = args.model
    module_name, _, function = name.partition(":")
    module = _of_program(args, importlib.import_module, module_name)
    make = getattr(module, function, None)
    if make is None:
        hint = meant(function, dir(module))
        raise SettingError(f"MODEL {name}: module {module_name!r} has no attribute {function!r}.{hint}")
    _check_factory(name, make)
    result = _of_program(args, make)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise SettingError(
            f"MODEL {name} returned {type(result).__name__}; expected (model, inputs) or (model, inputs, scenes)."
        )
    model, inputs, *more = result
    return model, inputs, more[0] if more else ()


def _of_program(args: argparse.Namespace, call: Callable[..., Any], *arguments: str) -> Any:
    """What code of the user's returns. What it raises ends the command as it would end a program of theirs.

    Raises: SettingError for a module that is not there.
    """
    args.in_script, entry = True, _of_program.__code__
    try:
        result = call(*arguments)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and frames_of_program(error.__traceback__, entry) is None:
            args.in_script = False
            raise SettingError(f"MODEL {args.model}: {error}.") from None
        show_program_alone(entry)
        raise
    args.in_script = False
    return result


def _check_factory(name: str, make: Any) -> None:
    """Raises SettingError for what cannot be called without arguments."""
    if not callable(make):
        raise SettingError(f"MODEL {name} is {type(make).__name__}; expected a function.")
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some of C have none to look at
        return
    try:
        signature.bind()
    except TypeError as error:
        raise SettingError(f"MODEL {name}{signature}: {error}; expected a function without arguments.") from None


class _Program(nn.Module):
    """A network of ours from plain tensors to a plain one.  dense: to the bird's-eye view."""

    def __init__(self, network: nn.Module, sp: Any, grid: Sequence[int], n_items: int, dense: bool) -> None:
        super().__init__()
        self.network, self._sp, self._dense = network, sp, dense
        self._grid, self._n_items = list(grid), n_items

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = self._sp.SparseConvTensor(features, coords, self._grid, self._n_items)
        y = self.network(x)
        output: torch.Tensor = y.dense().flatten(1, 2) if self._dense else y.features
        return output


def _network(name: str, rows: Sequence[int]) -> Example:
    """SECOND or the U-Net on scenes of a street, the largest one first."""
    import spconv.pytorch as sp

    from ..tools.networks.spconv import ResidualUNet, Second

    voxels = [street_voxels(count) for count in sorted(rows, reverse=True)]
    _, grid, n_items = voxels[0]
    torch.manual_seed(0)
    dense = name == "second"
    network = Second(sp) if dense else ResidualUNet(sp)
    model = _Program(network, sp, grid, n_items, dense)
    scenes = [(torch.randn(len(coords), 4), coords) for coords, _, _ in voxels]
    return model.eval(), scenes[0], scenes[1:]
