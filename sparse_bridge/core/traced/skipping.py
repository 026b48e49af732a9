"""Have an old torch's compiler leave sparse_bridge alone, without importing that compiler."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from ..device.late_import import when_imported

_ROOT = pathlib.Path(__file__).parents[2]
# What stands in torch's own layers, which are traced on.
_TRACED = {
    "hooks.py",
    "adapters/torchsparse/sequence.py",
    "core/conv/deferred/shortcuts.py",
    "core/conv/deferred/features.py",
}


def skip() -> None:
    """From now on `torch.compile` runs the layers of this package between two graphs."""
    when_imported("torch._dynamo.trace_rules", _add)


def _add(rules: Any) -> None:
    rules.SKIP_DIRS.extend(map(str, _skipped(_ROOT)))
    rules._recompile_re()


def _skipped(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files and whole folders without those that are traced."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(_ROOT).as_posix()
        if path.is_dir() and any(entry.startswith(f"{name}/") for entry in _TRACED):
            yield from _skipped(path)
        elif name not in _TRACED:
            yield path
