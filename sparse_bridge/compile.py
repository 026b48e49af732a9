"""Operators of sparse_bridge in `torch.ops`, for programs that were compiled, exported or saved.

Import this module before `torch.export.load`: it registers the operators that a saved program
names, and the maps of every framework. `policy` chooses what selective checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import log
from .adapters import base
from .core import functional as _functional  # noqa: F401
from .core.compile import handles
from .core.compile import norms as _norms  # noqa: F401
from .core.compile.functional import portable
from .core.compile.fusion import fuse
from .core.compile.library import NAMESPACE, names
from .errors import require_type

__all__ = ["fuse", "live_handles", "needed", "operators", "policy", "portable"]

for _framework in base.frameworks():
    _framework.register_operators()

_MAPS = ("coordinates", "map", "new_map", "minkowski_insert", "same_rows")


def operators() -> list[str]:
    """Names of all operators, as `torch.ops` and saved programs know them."""
    return [f"{NAMESPACE}::{name}" for name in names()]


def policy(*keep: Any) -> Callable[..., Any]:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Maps are kept always: they are small beside features, and building one waits for the device.
    keep: further operators whose results are kept (`torch.ops.sparse_bridge.conv.default`, or one
    of torch's own); all others are computed again in the backward pass.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    library: Any = torch.ops.sparse_bridge
    saved = {getattr(library, name).default for name in _MAPS} | set(keep)

    def choose(context: Any, operator: Any, *ignored: Any, **more: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def live_handles() -> int:
    """How many maps and sets of coordinates compiled graphs keep alive in this process."""
    return handles.count()


def needed(program: torch.export.ExportedProgram) -> list[str]:
    """The operators of sparse_bridge that an exported program calls. Raises: DataTypeError for what is none."""
    require_type("needed()", program, torch.export.ExportedProgram, "what torch.export.export returns")
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    names = {t.name() for t in targets if isinstance(t, torch._ops.OpOverload)}
    return sorted(name for name in names if name.startswith(f"{NAMESPACE}::"))


def _eager(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return graph.forward


def __getattr__(name: str) -> Any:
    """`backend`, for one release: what `torch.compile` looks up for the name "sparse_bridge", also where there is
    nothing to compile."""
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    log.warn(
        'torch.compile(backend="sparse_bridge") means backend="eager" now; the next release does not accept it. Type '
        'backend="eager" where you need fullgraph=True. Elsewhere leave torch.compile out: sparse modules run eagerly '
        "or are replayed without it.",
        FutureWarning,
    )
    return _eager
