"""Options of `python -m sparse_bridge package`, and what is refused before torch is imported."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import SettingError
from ..names import meant
from ..tools.harness.arguments import number, path
from .warm_names import MODELS

_SUMMARY = "write a network as a folder that a C or C++ program runs without Python"
_TEXT = """\
Write a network as a folder that a program runs without Python. On the CPU, in C++: AOTInductor's
package, the source of the operators, an example with a CMake file, and recorded scenes. With
--target on a GPU, in C: kernels, weights and the list of launches in one file, a player, an example
with a CMake file, and recorded scenes. It takes no GPU to write one.

  python -m sparse_bridge package second --out second --check
  python -m sparse_bridge package detector:make --out detector
  python -m sparse_bridge package detector:make --target cuda:87 --rows 150000 --out detector

MODEL is second or unet, with weights at random, or module:function. The function is called without
arguments and returns the model in eval mode and the inputs of a scene, or these and a list of the
inputs of further scenes. spconv is bridged before the module is imported, with --target every
framework."""

_ROWS = (20000, 5000)
_GPU_ROWS = 150000
_DTYPES = ("float32", "float16", "bfloat16")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `package` command; `args.func` becomes `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "package", help=_SUMMARY, description=_TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(MODELS)}, or module:function")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--rows",
        type=number(int, 2),
        nargs="+",
        metavar="N",
        help=f"voxels of the scenes of {' and '.join(MODELS)} (default: {' '.join(map(str, _ROWS))}); "
        f"with --target the most rows of an input, for which memory is planned (default: {_GPU_ROWS})",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="GPU",
        help="write for this GPU, cuda: and a compute capability, or hip: and an architecture; may be given again",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="with --target: of model and features (default: as they are)")
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
    shipped = args.model in MODELS
    if args.dtype and not args.target:
        raise SettingError(f"--dtype {args.dtype} is for packages with --target. Leave it out.")
    if args.target and args.rows and len(args.rows) > 1:
        raise SettingError(f"--rows {' '.join(map(str, args.rows))}: expected one number with --target, the most rows.")
    if args.rows and not shipped and not args.target:
        raise SettingError(f"--rows is for {' and '.join(MODELS)}; {args.model} brings its own scenes. Leave it out.")
    module, _, function = args.model.partition(":")
    if not shipped and not (module and function):
        hint = meant(module, MODELS)
        raise SettingError(f"MODEL {args.model!r}: expected {', '.join(MODELS)}, or module:function.{hint}")
    if args.out.exists() and not args.out.is_dir():
        raise SettingError(f"--out {args.out}: got a file; expected a folder.")
    from . import gpu_package, package

    if args.target:
        most = (args.rows or (_GPU_ROWS,))[0]
        return gpu_package.run(args, most, [min(most, count) for count in _ROWS])
    return package.run(args, args.rows or _ROWS)
