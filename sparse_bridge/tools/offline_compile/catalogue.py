"""Every kernel in every form in which it can be launched on a target.

One list serves the compile check and the test that records launches and finds each of them here:
what the files `forms_*` declare.
Tiles are not written down again: they are what `tile_config` and `candidates` answer over classes
of channels and rows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib

from ...kernels.runtime.target import Target
from .forms import Form, Space

_FILES = [file.stem for file in pathlib.Path(__file__).parent.glob("forms_*.py")]
DECLARATIONS = [importlib.import_module(f".{name}", __package__) for name in sorted(_FILES)]


@functools.lru_cache(maxsize=32)
def spaces(target: Target) -> dict[str, tuple[Space, ...]]:
    """The spaces of every kernel that `target` launches, by kernel name."""
    declared = (entry for module in DECLARATIONS for entry in module.declare(target))
    return {kernel.name: tuple(spaces) for kernel, spaces in declared}


def covering(target: Target) -> list[Form]:
    """The forms to compile, see `forms`."""
    forms = (v for declared in spaces(target).values() for s in declared for v in s.covering())
    if not target.generation.small_pointers:
        forms = (dataclasses.replace(form, large=False) for form in forms)
    return list(dict.fromkeys(forms))


def launchable(target: Target, launch: Form) -> bool:
    """Whether the list holds what `as_launched` returned."""
    return any(space.holds(launch) for space in spaces(target).get(launch.kernel, ()))
