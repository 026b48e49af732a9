"""`%load_ext sparse_bridge`: magics for IPython and Jupyter, which this file does not import."""

from __future__ import annotations

from typing import Any

from ...adapters import lifecycle
from .recorder import ModelProfile, profile

_NAMES = {"line_cell": ("sparse_profile",), "line": ("sparse_status", "sparse_report")}


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to an IPython shell. It enables no framework.

    %%sparse_profile [model]    run the cell, then show what each layer did and cost; without a
                                model, of every module that the cell calls
    %sparse_profile statement   the same of one line
    %sparse_status              how frameworks are answered
    %sparse_report [model]      what ran so far; of a model, its layers
    """

    def sparse_profile(line: str, cell: str | None = None) -> ModelProfile | None:
        model = shell.ev(line) if cell is not None and line.strip() else None
        with profile(model) as measured:
            ran = shell.run_cell(line if cell is None else cell)
        return measured if ran.success else None  # the shell has shown the error

    def sparse_status(line: str) -> Any:
        return lifecycle.status()

    def sparse_report(line: str) -> Any:
        return lifecycle.report(shell.ev(line) if line.strip() else None)

    magics = {magic.__name__: magic for magic in (sparse_profile, sparse_status, sparse_report)}
    for magic_kind, names in _NAMES.items():
        for name in names:
            magics[name].__doc__ = load_ipython_extension.__doc__
            shell.register_magic_function(magics[name], magic_kind=magic_kind, magic_name=name)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away."""
    for names in _NAMES.values():
        for name in names:
            for magics in shell.magics_manager.magics.values():
                magics.pop(name, None)
