"""Calls of modules while a profile runs, and what they add up to by layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...adapters import call_stats, protocol
from ...core.device import trace
from .clock import Interval, Peak
from .results import LayerProfile, Totals


class Layer:
    """A module and its calls; `settle` turns intervals into milliseconds."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = weakref.ref(module)
        self.part_of: Layer | None = None  # the framework's layer around it
        self.kind: Any = type(module)
        self.name = name
        self.calls: list[Call] = []
        self.backward: list[Interval] = []
        self.facts = None if (facts := protocol.of(module)) is None else facts.describe(module)
        self.host_ms: list[float] = []
        self.device_ms: list[float] = []
        self.backward_host_ms = self.backward_device_ms = 0.0
        self.backward_nodes = 0

    def used(self) -> Iterator[Interval]:
        """Intervals that are not settled."""
        yield from self.backward
        for call in self.calls[len(self.host_ms) :]:
            yield call.interval

    def settle(self) -> None:
        """Add up what the GPU has finished."""
        for call in self.calls[len(self.host_ms) :]:
            self.host_ms.append(call.own(call.interval.host_ms, "host_ms"))
            device = call.interval.device_ms
            if device is not None:
                self.device_ms.append(call.own(device, "device_ms"))
        for interval in self.backward:
            self.backward_host_ms += interval.host_ms
            self.backward_device_ms += interval.device_ms or 0.0
            self.backward_nodes += 1
        self.backward.clear()


class Call:
    """One call of a module.

    around: the call that it is part of.  events_at, notes_at: what was said before it.
    listed: whether it is a layer by itself, not a container of others or a part of one.
    """

    def __init__(self, layer: Layer, around: Call | None, events_at: int, notes_at: int) -> None:
        self.layer, self.around = layer, around
        self.events_at, self.notes_at = events_at, notes_at
        self.inside: list[Call] = []
        self.listed = False
        self.stops: list[Any] = []  # what made the inputs, in the gradient's graph
        self.began = 0  # as of `Gradients.watch`
        self.shape_in: tuple[int, ...] | None = None
        self.shape_out: tuple[int, ...] | None = None
        self.output_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.peak: Peak | None = None
        self.interval: Interval = Interval(None)
        self.events: list[trace.Event] = []
        self.notes: list[call_stats.Call] = []

    def end(self, events: list[trace.Event], notes: list[call_stats.Call]) -> None:
        """The call is over; events, notes: its own, without those of calls inside."""
        self.events, self.notes = events, notes
        self.peak_bytes = None if self.peak is None else self.peak.bytes()
        self.peak = None
        if self.around is not None:
            self.around.inside.append(self)
        own = protocol.name_of(self.layer.kind) is not None and bool(notes)
        if own and not any(call.notes or call.events for call in self.inside):
            self._absorb()  # a framework's layer around one of torch's
        self.listed = not self.inside or bool(events or notes)
        self.layer.calls.append(self)

    def _absorb(self) -> None:
        for call in self.inside:
            call.listed, call.layer.part_of = False, self.layer
        self.inside = []

    def see(self, result: torch.Tensor | None) -> None:
        """Features of the result."""
        if result is not None:
            self.shape_out = tuple(result.shape)
            self.output_bytes = result.numel() * result.element_size()

    def own(self, whole: float, clock: str) -> float:
        """Without the calls inside."""
        return max(whole - sum(getattr(call.interval, clock) or 0.0 for call in self.inside), 0.0)


def layers_of(layers: Iterable[Layer]) -> tuple[LayerProfile, ...]:
    """Those that were called and are no containers, in the order of their first calls."""
    called = [layer for layer in layers if any(call.listed for call in layer.calls)]
    return tuple(map(_profile, called))


def _profile(layer: Layer) -> LayerProfile:
    listed = [index for index, call in enumerate(layer.calls) if call.listed]
    calls = [layer.calls[index] for index in listed]
    last, events = calls[-1], [event for call in calls for event in call.events]
    notes = [note for call in calls for note in call.notes]
    original: dict[str, int] = {}
    for _, _, reason in notes:
        if reason is not None:
            original[reason] = original.get(reason, 0) + 1
    facts = layer.facts
    return LayerProfile(
        name=layer.name,
        module=layer.kind.__name__,
        framework=_framework(layer, notes),
        kind=facts.kind if facts is not None else _function(layer, notes),
        kernel=None if facts is None else facts.kernel,
        stride=None if facts is None else facts.stride,
        calls=len(calls),
        bridged=sum(reason is None for _, _, reason in notes),
        original=original,
        **_sizes(last),
        dataflows=tuple(dict.fromkeys(event.dataflow for event in events)),
        host_ms=tuple(layer.host_ms[index] for index in listed),
        device_ms=tuple(layer.device_ms[index] for index in listed) if layer.device_ms else (),
        backward_host_ms=layer.backward_host_ms,
        backward_device_ms=layer.backward_device_ms,
        backward_nodes=layer.backward_nodes,
        peak_bytes=max((c.peak_bytes for c in calls if c.peak_bytes is not None), default=None),
        output_bytes=last.output_bytes,
    )


def _framework(layer: Layer, notes: list[call_stats.Call]) -> str:
    if notes:
        return notes[-1][0]
    if layer.kind.__module__.partition(".")[0] == "torch":
        return "torch"
    return protocol.name_of(layer.kind) or ""


def _function(layer: Layer, notes: list[call_stats.Call]) -> str:
    """The framework's functions that a module of the model's own called, else the class."""
    called = dict.fromkeys(name for _, name, _ in notes)
    return ", ".join(called) or layer.kind.__name__


def _sizes(call: Call) -> dict[str, int | None]:
    """Rows and channels: as the kernel map has them, else those of the features."""
    if call.events:
        first, last = call.events[0], call.events[-1]
        return {
            "rows_in": first.n_in,
            "rows_out": last.n_out,
            "channels_in": first.c_in,
            "channels_out": last.c_out,
            "offsets": first.n_offsets,
        }
    rows_in, channels_in = _matrix(call.shape_in)
    rows_out, channels_out = _matrix(call.shape_out)
    return {
        "rows_in": rows_in,
        "rows_out": rows_out,
        "channels_in": channels_in,
        "channels_out": channels_out,
        "offsets": None,
    }


def _matrix(shape: tuple[int, ...] | None) -> tuple[int | None, int | None]:
    """Rows and channels of features [N, C]; other shapes have none."""
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (None, None)


def totals_of(layers: Iterable[LayerProfile], roots: list[Call]) -> Totals:
    """Sums over whole calls."""
    layers = list(layers)
    devices = [ms for call in roots if (ms := call.interval.device_ms) is not None]
    host = sum(call.interval.host_ms for call in roots)
    device = sum(devices) if devices else None
    forward = host if device is None else device
    inside = sum(sum(layer.host_ms if device is None else layer.device_ms) for layer in layers)
    backward = sum(layer.backward_device_ms for layer in layers)
    return Totals(
        calls=len(roots),
        host_ms=host,
        device_ms=device,
        backward_host_ms=sum(layer.backward_host_ms for layer in layers),
        backward_device_ms=None if device is None else backward,
        between_ms=max(forward - inside, 0.0),
        peak_bytes=max((c.peak_bytes for c in roots if c.peak_bytes is not None), default=None),
    )
