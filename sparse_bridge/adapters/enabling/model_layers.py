"""The sparse layers of a model, with what a profile of it has measured."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ... import state
from ...errors import DataTypeError
from ...tables import Column, Table, megabytes

_measured: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def keep_measured(model: Any, layers: Sequence[Any]) -> None:
    """Remember what a profile has measured of a model's layers, as long as that lives."""
    _measured[model] = tuple(layers)


def measured(model: Any) -> tuple[Any, ...]:
    """What the last profile has measured of a model, as `tools.profiling.results.LayerProfile`."""
    return _measured.get(model, ())


@state.owns
def reset() -> None:
    """Forget what profiles have measured."""
    _measured.clear()


@dataclasses.dataclass(frozen=True)
class ModuleReport:
    """A sparse layer of a model.

    parameter_bytes: of its own.  calls, ms, peak_bytes: of the last `sparse_bridge.profile` of the
    model, forward and backward, on the GPU where there is one; None where it was not measured.
    """

    name: str
    framework: str
    kind: str
    parameter_bytes: int
    calls: int | None = None
    ms: float | None = None
    peak_bytes: int | None = None


def modules_of(model: Any) -> tuple[ModuleReport, ...]:
    """The sparse layers of a torch module, in its own order; () for None.

    Raises: DataTypeError for anything else.
    """
    if model is None:
        return ()
    if not hasattr(model, "named_modules"):
        raise DataTypeError(f"got {type(model).__name__}; expected a torch.nn.Module, or nothing.")
    from .. import protocol

    seen = {layer.name: layer for layer in measured(model)}
    found = []
    for name, module in model.named_modules():
        layer, adapter = seen.get(name), protocol.of(module)
        facts = None if adapter is None else adapter.describe(module)
        framework, kind = protocol.name_of(type(module)) or "", "" if facts is None else facts.kind
        times: tuple[Any, ...] = ()
        if layer is not None:
            framework, kind = framework or layer.framework, kind or layer.kind
            times = (layer.calls, layer.total_ms, layer.peak_bytes)
        if not kind or framework in ("", "torch"):
            continue
        size = sum(one.numel() * one.element_size() for one in module.parameters(recurse=False))
        found.append(ModuleReport(name, framework, kind, size, *times))
    return tuple(found)


_MODULE_COLUMNS = (
    Column("layer", True),
    Column("framework", True, 2),
    Column("kind", True),
    Column("parameters MiB", spare=3),
    Column("calls", spare=1),
    Column("ms"),
    Column("peak MiB"),
)


def module_table(modules: Iterable[ModuleReport]) -> Table:
    """The table that a report shows."""
    rows = [
        (
            one.name,
            one.framework,
            one.kind,
            megabytes(one.parameter_bytes),
            "" if one.calls is None else str(one.calls),
            "" if one.ms is None else f"{one.ms:,.2f}",
            megabytes(one.peak_bytes),
        )
        for one in modules
    ]
    measured = any(one.ms is not None for one in modules)
    remark = "" if measured else "Not measured: run the model in sparse_bridge.profile(model)."
    return Table("Layers of the model", _MODULE_COLUMNS, rows, remark=remark)
