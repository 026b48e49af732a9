"""`python -m sparse_bridge package`: a network as a folder that a C++ program runs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import export
from ..errors import SettingError
from ..export import package_check
from ..tools.demo.voxels import street_voxels
from .warm_jobs import MODELS

_SUMMARY = "write a network as a folder that a C++ program runs without Python"
_TEXT = """\
Write a network as a folder that a C++ program runs without Python, on the CPU: AOTInductor's
package, the source of the operators, an example with a CMake file, and recorded scenes.

  python -m sparse_bridge package second --out second --check
  python -m sparse_bridge package detector:make --out detector

MODEL is second or unet, with weights at random, or module:function. The function is called without
arguments and returns the model in eval mode and the inputs of a scene, or these and a list of the
inputs of further scenes. spconv is bridged before the module is imported."""

_ROWS = (20000, 5000)

Example = tuple[nn.Module, Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]]


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
        help=f"voxels of the scenes of {' and '.join(MODELS)} (default: {' '.join(map(str, _ROWS))})",
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
    if args.rows and not shipped:
        raise SettingError(f"--rows is for {' and '.join(MODELS)}; {args.model} brings its own scenes. Leave it out.")
    rows = args.rows or _ROWS
    if min(rows) < 2:
        raise SettingError(f"--rows {min(rows)}: expected 2 or more.")
    if args.out.exists() and not args.out.is_dir():
        raise SettingError(f"--out {args.out}: got a file; expected a folder.")
    with sparse_bridge.enable("spconv"):
        network = _network(args.model, rows) if shipped else _own(args.model)
        model, inputs, scenes = network
        export.export_package(model, inputs, args.out, scenes=scenes)
    ran = package_check.check(args.out, repeat=5) if args.check else None
    if args.json:
        scenes_run = None if ran is None else [scene._asdict() for scene in ran]
        sys.stdout.write(json.dumps({"folder": str(args.out), "scenes": scenes_run}) + "\n")
        return 0
    sys.stdout.write(f"{args.out}: a package with operators, example and scenes, see README.md\n")
    for scene in ran or ():
        rows, milliseconds, error = scene
        sys.stdout.write(f"  {rows} rows: {milliseconds:.1f} ms, error {error:.1g} of the RMS\n")
    return 0


def _own(name: str) -> Example:
    """What module:function makes."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise SettingError(f"MODEL {name!r}: expected {', '.join(MODELS)}, or module:function.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module.split(".")[0]:
            raise
        raise SettingError(f"MODEL {name}: {error}.") from None
    _check_factory(name, make)
    result = make()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise SettingError(
            f"MODEL {name} returned {type(result).__name__}; expected (model, inputs) or (model, inputs, scenes)."
        )
    model, inputs, *more = result
    return model, inputs, more[0] if more else ()


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
