"""Have an old torch's compiler leave sparse_bridge alone, without importing that compiler."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_RULES = "torch._dynamo.trace_rules"
_ROOT = pathlib.Path(__file__).parents[2]
# What stands in torch's own layers, which are traced on.
_TRACED = {
    "hooks.py",
    "adapters/torchsparse/sequence.py",
    "core/conv/waiting/shortcuts.py",
    "core/conv/waiting/tensors.py",
}


def skip() -> None:
    """From now on `torch.compile` runs the layers of this package between two graphs."""
    if _RULES in sys.modules:
        _add(sys.modules[_RULES])
    else:
        sys.meta_path.insert(0, _Finder())


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


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the module that holds the compiler's rules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _RULES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _add(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
