"""The command line: `python -m sparse_bridge run train.py ...`, `doctor`, `demo` and the rest."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import _version, workers
from .adapters.enabling import inherited
from .errors import SparseBridgeError, UnsupportedError
from .names import meant
from .tools.offline_compile import command as offline_compile

if TYPE_CHECKING:
    from rich.console import Console

# Commands with options of their own: imported only when they are asked for. `compat` and
# `benchmarks` belong to the source checkout, not to the installed package.
_LAZY = {
    "run": ("sparse_bridge.commands.run", "run a script or module with the bridge enabled"),
    "demo": (
        "sparse_bridge.tools.demo.cli",
        "time two networks on a scan or a built-in street, teach a third one to label it",
    ),
    "warm": ("sparse_bridge.commands.warm_options", "compile and tune kernels before they are needed"),
    "package": (
        "sparse_bridge.commands.package_options",
        "write a network as a folder that a C++ program runs without Python",
    ),
    "prove": ("sparse_bridge.commands.prove", "show that this GPU computes rightly, in ten minutes"),
    "verify": (
        "sparse_bridge.tools.checkpoints.command",
        "evaluate published weights with their own project on this engine",
    ),
    "cache": ("sparse_bridge.commands.cache_options", "show or clear what tuning has stored"),
    "surface": ("sparse_bridge.tools.api_coverage.command", "list what of each framework is answered"),
    "bench": ("benchmarks.cli", "time layers and networks, peers side by side"),
    "compat": ("compat.cli", "run the compatibility matrix"),
}

_NO_TORCH = (
    f"{sys.executable} finds no torch; expected 2.4 or newer. Install the build for your machine "
    "first: `pip install torch` (NVIDIA), or with --index-url "
    "https://download.pytorch.org/whl/rocm6.4 (AMD) or https://download.pytorch.org/whl/cpu (CPU)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done.  1: the work was done and its answer is no (a check failed).  2: refused, in one line
    on stderr: wrong usage, input or machine.  130: Ctrl-C.
    `run` passes on whatever the script raises or exits with.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = argparse.Namespace()
    inherited.forget()  # a command of its own, whoever has started it
    if argv[:1] != ["doctor"]:  # which shows what the user's own programs find
        workers.wait_passively()
    try:
        parser = make_parser(command=argv[0] if argv else None)
        parser.refuse_before_command(argv[:1])
        args = parser.parse_args(argv)
        return args.func(args) or 0
    except SparseBridgeError as error:
        if getattr(args, "in_script", False):
            raise  # the script's author wants to see where
        return _refused(str(error))
    except OSError as error:
        if getattr(args, "in_script", False):
            raise
        return _machine_refused(error)
    except ModuleNotFoundError as error:
        if getattr(args, "in_script", False) or error.name != "torch":
            raise
        return _refused(_NO_TORCH)
    except KeyboardInterrupt:
        if getattr(args, "in_script", False):
            raise
        _console(stderr=True).print("sparse_bridge: interrupted", style="red")
        return 130


def _refused(why: str) -> int:
    _console(stderr=True).print(f"sparse_bridge: {why}", style="red", soft_wrap=True)
    return 2


def _machine_refused(error: OSError) -> int:
    """A file or folder that cannot be read or written, in one line."""
    if isinstance(error, BrokenPipeError):  # `... | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    remedy = {
        errno.ENOSPC: "free some space, or choose a folder on another disk",
        errno.EACCES: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that can be written to",
    }.get(error.errno or 0, "check the path")
    file_name = f"{error.filename}: " if error.filename else ""
    return _refused(f"{file_name}{error.strerror or error}; {remedy}.")


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, emoji=False, markup=False, highlight=False)


class _Parser(argparse.ArgumentParser):
    """Refuses wrong usage in one line, with what may have been meant; sub-commands are of this class, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # "-1GiB" and "-1e2" are values that are refused or taken, not options that nobody knows.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        see = f"see `{self.prog} --help`.\n"
        self.exit(
            2, f"sparse_bridge: {message} S{see[1:]}" if message.endswith("?") else f"sparse_bridge: {message}; {see}"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what this parser does not know itself, so that the command whose option it would be is named."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = meant(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'.' * bool(hint)}{hint}")
        return found, unknown

    def refuse_before_command(self, words: Sequence[str]) -> None:
        """End the program where one of them is an option of no command. argparse would blame what comes after it."""
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-") and not any(option.startswith(name) for option in self._option_string_actions):
                hint = meant(name, self._option_string_actions)
                self.error(f"unrecognized arguments before the command: {word}{'.' * bool(hint)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = meant(str(value), map(str, action.choices or ()))
            error.message += "." * bool(hint) + hint
            raise


class _ShowVersion(argparse.Action):
    """As argparse's own; git is asked only where this is."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> NoReturn:
        sys.stdout.write(f"sparse_bridge {_version.described()}\n")
        parser.exit()


def _program() -> str:
    """How this process was started, as users would type it."""
    script = pathlib.Path(sys.argv[0]).stem
    return script if script == "sparse-bridge" else "python -m sparse_bridge"


def make_parser(command: str | None) -> _Parser:
    parser = _Parser(
        prog=_program(),
        description="Run spconv, torchsparse, MinkowskiEngine and FlexGEMM models on one Triton engine.",
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show the version, in a checkout with its commit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    for name, (module, summary) in _LAZY.items():
        if name == command:
            _command(name, module).add_parser(commands)
        elif module.startswith(f"{__package__}.") or _checkout(module):
            commands.add_parser(name, help=summary, add_help=False)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show devices, versions, settings and what enable() would do",
        description="Show devices, versions, settings, and per framework what enable() would do.",
    )
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    offline_compile.add_options(doctor)
    doctor.set_defaults(func=run_doctor)


def _checkout(module: str) -> pathlib.Path | None:
    """The folder of a source checkout beside this package that holds `module`."""
    top, folder = module.partition(".")[0], pathlib.Path(__file__).resolve().parents[1]
    is_checkout = top != __package__ and (folder / top / "cli.py").is_file()
    return folder if is_checkout else None


def _command(name: str, module: str) -> Any:
    """The module that implements a command: it has `add_parser(commands)`."""
    top, checkout = module.partition(".")[0], _checkout(module)
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?") and not (error.name or "").startswith(module):
            raise
        where = "a source checkout" if top != __package__ else "the full package"
        raise UnsupportedError(
            f"this installation of sparse_bridge has no {name!r} command; it needs {where}."
        ) from None


def run_doctor(args: argparse.Namespace) -> int:
    if args.targets is not None:
        return offline_compile.main(args, _console())
    offline_compile.refuse_without_targets(args)
    from .tools import doctor

    facts = doctor.collect()
    console = _console()
    if args.json:
        console.print_json(data=facts)
    else:
        doctor.show(facts, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
