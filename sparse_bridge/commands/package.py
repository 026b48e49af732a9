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
from ..tools.harness.progress import Progress
from .program_frames import frames_of_program, show_program_alone
from .warm_names import MODELS

Example = tuple[nn.Module, Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]]


def run(args: argparse.Namespace, rows: Sequence[int]) -> int:
    """Raises: SettingError for a model that is not there, ExportError for one that does not fit."""
    import sparse_bridge

    with Progress(1 + args.check) as progress, sparse_bridge.enable("spconv"):
        progress.start(f"make {args.model}")
        model, inputs, scenes = example_of(args, rows)
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
    show(ran)
    return 0


def show(ran: Sequence[package_check.Ran] | None) -> None:
    """Print a line for each scene that the example ran."""
    for scene in ran or ():
        sys.stdout.write(f"  {scene.rows} rows: {scene.milliseconds:.1f} ms, error {scene.error:.1g} of the RMS\n")


def example_of(args: argparse.Namespace, rows: Sequence[int]) -> Example:
    """(model, inputs, inputs of further scenes) of a command. rows: of the scenes of networks that come with us.

    Raises: SettingError for a model that is not there.
    """
    return _network(args.model, rows) if args.model in MODELS else _own(args)


def _own(args: argparse.Namespace) -> Example:
    """What module:function makes."""
    name = args.model
    module_name, _, function = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or module_name.endswith(".py"):
        raise SettingError(f"MODEL {name}: {module_name!r} is no module; name it as `import` does, in its folder.")
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
