"""Have Inductor fuse what follows convolutions, by its setting for passes of others."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import uuid
from typing import TYPE_CHECKING, Any

from torch.fx import Graph

from ... import settings
from . import fusion, writes

if TYPE_CHECKING:
    CustomGraphPass = object
else:
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        CustomGraphPass = object

_SETTING = "pre_grad_custom_pass"


class Fuse(CustomGraphPass):
    """The passes that were installed earlier, then `fuse`."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for graph_pass in _several(self._passes):
            graph_pass(graph)
        if settings.get().optimize != "off":
            fusion.fuse(graph)

    def uuid(self) -> Any:
        """What tells caches of graphs that the pass is another one; None: not to be cached."""
        parts = [graph_pass.uuid() if hasattr(graph_pass, "uuid") else None for graph_pass in _several(self._passes)]
        if None in parts:
            return None
        return f"{_version()} {settings.get().optimize != 'off'} {parts}"

    def __reduce__(self) -> Any:
        """Caches that know nothing of `uuid` take the pickle of Inductor's settings as their key:
        that of a pass which is not to be cached is another one each time."""
        return str, (self.uuid() or f"{uuid.uuid4()}",)


def install() -> None:
    """Put `fuse` behind the passes that Inductor has been given so far. A release of torch without
    the setting, or without graph passes that caches know, does without."""
    try:
        from torch._inductor import config
    except ImportError:
        return
    if CustomGraphPass is not object and hasattr(config, _SETTING):
        setattr(config, _SETTING, Fuse(getattr(config, _SETTING)))


def _several(passes: Any) -> tuple[Any, ...]:
    return tuple(passes) if isinstance(passes, (list, tuple)) else () if passes is None else (passes,)


@functools.cache
def _version() -> str:
    files = [pathlib.Path(str(module.__file__)) for module in (fusion, writes)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
