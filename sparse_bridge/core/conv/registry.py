"""Which dataflow computes a convolution.

A new dataflow is a file in `dataflows`, whose `DATAFLOW` says what it is, and a line in
`settings.DATAFLOWS`. A dataflow that the settings force serves or raises; "auto" takes the first of
`automatic()` that serves, and the last of those serves everything.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ... import log, settings, state
from ...errors import DeviceError, UnsupportedError
from ...kernels.runtime.target import Target
from ...refusals import Refusal, Why
from .dataflow import Case, Dataflow

_automatic: tuple[str, ...] = ("masked", "per_offset")
_IRREGULAR = ("grouped", "per_offset")  # the same for maps that tables cannot hold
_in_torch: dict[Case, list[Refusal]] = {}  # on GPUs, although nobody forces torch
_OF_DEVICE = {Why.FLOW_DEVICE, Why.FLOW_DEVICE_DTYPE, Why.FLOW_FAULT}  # another device may serve


def automatic() -> tuple[str, ...]:
    """The dataflows that "auto" tries, in this order."""
    return _automatic


@state.owns
def reset() -> None:
    """Forget what ran in torch."""
    _in_torch.clear()


def in_torch() -> tuple[str, ...]:
    """What ran in torch on GPUs although nobody forced it, and why, a line each."""
    return tuple(itertools.starmap(_message, list(_in_torch.items())))


def _message(case: Case, reasons: list[Refusal]) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    return f"layers in {dtype} on {case.device} run in torch: {'; '.join(map(str, reasons))}"


@contextmanager
def preferred(name: str) -> Iterator[None]:
    """Let "auto" try `name` first, for the length of a `with` block (process-wide)."""
    global _automatic
    previous, _automatic = _automatic, (name, *_automatic)
    settings.changed()
    try:
        yield
    finally:
        _automatic = previous
        settings.changed()


@functools.cache
def entry(name: str) -> Dataflow:
    """The dataflow that settings call `name`; behind a colon: one of its file's `VARIANTS`."""
    file, _, variant = name.partition(":")
    module = importlib.import_module(f".dataflows.{file}", __package__)
    dataflow: Dataflow = module.VARIANTS[variant] if variant else module.DATAFLOW
    return dataflow


def choose(case: Case, preference: str = "") -> Dataflow:
    """The dataflow of a convolution. Maps that tables cannot hold, as repeated coordinates make
    them, are lists of pairs: whatever is forced, kernels take them by groups and torch by offset.

    preference: of the layer's own module, which comes before the settings.
    Raises: DeviceError, UnsupportedError with the reasons why a forced one cannot serve.
    """
    forced = preference or settings.get().dataflow
    if not case.regular:
        names = _IRREGULAR if forced == "auto" or entry(forced).kernels else _IRREGULAR[-1:]
        return next(flow for flow in map(entry, names) if _serves(flow, case))
    if forced != "auto":
        by = f"sparse_bridge.dataflow(module, {preference!r})" if preference else ""
        return _forced(entry(forced), case, by)
    return next(flow for flow in map(entry, _automatic) if _serves(flow, case)).by_rule()


def _forced(flow: Dataflow, case: Case, by: str = "") -> Dataflow:
    reasons = flow.refusals(case)
    if not reasons:
        return flow
    error_type = DeviceError if all(reason.why in _OF_DEVICE for reason in reasons) else UnsupportedError
    other = "auto or per_offset with it" if by else "SPARSE_BRIDGE_DATAFLOW=auto or per_offset"
    raise error_type(
        f"{by or 'SPARSE_BRIDGE_DATAFLOW=' + flow.name} cannot serve {case.dtype} on "
        f"{case.device}: {'; '.join(map(str, reasons))}. Use {other}, or another "
        "dtype."
    )


def _serves(flow: Dataflow, case: Case) -> bool:
    """Whether it does; if not, why is said in the log, and kept for the report."""
    reasons = flow.refusals(case)
    if reasons and case.device.type != "cpu" and _in_torch.get(case) != reasons:
        _in_torch[case] = reasons
        fault = any(reason.why is Why.FLOW_FAULT for reason in reasons)
        ask = " Please report this with the output of `python -m sparse_bridge doctor --json`." if fault else ""
        text = _message(case, reasons)
        log.once(("flow", text), f"{text}.{ask}", logging.WARNING if fault else logging.INFO)
    return not reasons


def row_kernels(case: Case) -> tuple[str, Target | None]:
    """(name for reports, target) of an operation on rows that is no convolution, of which there is
    one way for kernels and one for torch: kernels where `case` lets them.

    Raises: DeviceError where the settings force kernels that the device does not have.
    """
    forced = settings.get().dataflow
    flow = entry(_automatic[0] if forced == "auto" else forced)
    if not flow.kernels:
        return flow.name, None
    if forced != "auto" and any(reason.why is Why.FLOW_FAULT for reason in flow.refusals(case)):
        _forced(flow, case)
    return (flow.name, flow.target(case)) if _serves(flow, case) else ("per_offset", None)
