"""Every kernel in every form in which it can be launched on a target.

One list serves the compile check and the test that records launches and finds each of them here.
Tiles are not written down again: they are what `tile_config` and `candidates` answer over classes
of channels and rows.
"""

from __future__ import annotations

import dataclasses
import functools

from ...kernels.runtime.target import Target
from . import forms_gemm, forms_grouped, forms_maps, forms_narrow, forms_norms, forms_pools
from .forms import Form, Space

DECLARATIONS = (forms_maps, forms_gemm, forms_grouped, forms_narrow, forms_pools, forms_norms)


@functools.lru_cache(maxsize=32)
def spaces(target: Target) -> dict[str, tuple[Space, ...]]:
    """The spaces of every kernel that `target` launches, by kernel name."""
    declared = (made for module in DECLARATIONS for made in module.declare(target))
    return {kernel.name: tuple(spaces) for kernel, spaces in declared}


def covering(target: Target) -> list[Form]:
    """The forms to compile, see `forms`."""
    found = (v for declared in spaces(target).values() for s in declared for v in s.covering())
    if not target.generation.small_pointers:
        found = (dataclasses.replace(form, large=False) for form in found)
    return list(dict.fromkeys(found))


def launchable(target: Target, launch: Form) -> bool:
    """Whether the list holds what `as_launched` returned."""
    return any(space.holds(launch) for space in spaces(target).get(launch.kernel, ()))
