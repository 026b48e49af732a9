"""Turning the bridge on for a cell, and what it then says of itself."""

from __future__ import annotations

from importlib import metadata

import sparse_bridge
from sparse_bridge.adapters import base, import_hook
from sparse_bridge.adapters.lifecycle import FrameworkStatus, Handle
from sparse_bridge.errors import LifecycleError

from .matrix import Cell

__all__ = ["NotRun", "assert_all_bridged", "enable", "installed", "status"]


class NotRun(Exception):
    """A check does not apply to a cell; the message says why."""


def enable(cell: Cell) -> Handle:
    """Bridge the cell's framework in its mode, and others that the model imports.

    Raises:
        NotRun: patch mode is asked for where the real library does not import.
    """
    for other in cell.model.also:
        sparse_bridge.enable(other)
    try:
        return sparse_bridge.enable(cell.model.framework, mode=cell.mode, profile=cell.model.profile)
    except LifecycleError as error:
        if cell.mode != "patch":
            raise
        raise NotRun(str(error)) from None


def status(cell: Cell) -> FrameworkStatus:
    """How the cell's framework is answered."""
    return sparse_bridge.status()[cell.model.framework]


def assert_all_bridged(cell: Cell) -> int:
    """AssertionError if a layer has run in the original library, or none has; the layer calls."""
    layers = sparse_bridge.report().layers.get(cell.model.framework, {})
    original = {
        f"{layer}: {reason}" for layer, count in layers.items() for reason, times in count.original.items() if times
    }
    assert not original, f"ran in the original library: {'; '.join(sorted(original))}"
    bridged = sum(count.bridged for count in layers.values())
    assert bridged, "no layer ran bridged"
    return bridged


def installed(framework: str) -> str | None:
    """Version of the real library on this machine, whether or not it can be imported."""
    package = base.load(framework).packages[0]
    if not import_hook.installed(package):  # a stand-in has metadata, too
        return None
    found = metadata.packages_distributions().get(package)
    return metadata.version(found[0]) if found else None
