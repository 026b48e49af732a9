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

    by_name = {layer.name: layer for layer in measured(model)}
    reports = []
    for name, module in model.named_modules():
        layer, adapter = by_name.get(name), protocol.of(module)
        facts = None if adapter is None else adapter.describe(module)
        framework, category = protocol.name_of(type(module)) or "", "" if facts is None else facts.kind
        times: tuple[Any, ...] = ()
        if layer is not None:
            framework, category = framework or layer.framework, category or layer.kind
            times = (layer.calls, layer.total_ms, layer.peak_bytes)
        if not category or framework in ("", "torch"):
            continue
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters(recurse=False))
        reports.append(ModuleReport(name, framework, category, size, *times))
    return tuple(reports)


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
            report.name,
            report.framework,
            report.kind,
            megabytes(report.parameter_bytes),
            "" if report.calls is None else str(report.calls),
            "" if report.ms is None else f"{report.ms:,.2f}",
            megabytes(report.peak_bytes),
        )
        for report in modules
    ]
    measured = any(report.ms is not None for report in modules)
    remark = "" if measured else "Not measured: run the model in sparse_bridge.profile(model)."
    return Table("Layers of the model", _MODULE_COLUMNS, rows, remark=remark)
