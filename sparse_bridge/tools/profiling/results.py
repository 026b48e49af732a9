"""What a profile found, as values, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from ...tables import Column, Table, megabytes, times

_COLUMNS = (  # what matters first: a narrow notebook scrolls to the rest
    Column("layer", text=True),
    Column("kind", text=True, spare=1),
    Column("rows in", spare=7),
    Column("rows out"),
    Column("channels", spare=3),
    Column("dataflow", text=True, spare=2),
    Column("calls", spare=5),
    Column("host ms"),
    Column("device ms"),
    Column("backward", spare=4),
    Column("share"),
    Column("MiB", spare=6),
    Column("framework", text=True, spare=8),
    Column("kernel", spare=9),
    Column("stride", spare=10),
    Column("offsets", spare=11),
)


@dataclasses.dataclass(frozen=True, repr=False)
class LayerProfile:
    """One layer over all calls of a profile.

    Attributes:
        name: the module's path in the model.
        module: its class.
        framework: whose layer it is: a framework that is bridged, "torch", or "" for the model's
            own modules.
        kind: what it does: submanifold, strided, transposed, inverse, generative, pointwise,
            convolution, pool; the class, or the framework's function, of other layers.
        kernel, stride: per axis in the framework's order; None where it has none.
        calls: how often it was called.
        bridged: how many of its calls to the framework ran here.
        original: those that the original framework ran, by reason.
        rows_in, rows_out, channels_in, channels_out: of the last call; None where unknown.
        offsets: kernel volume of the last call's kernel map; None without one.
        dataflows: what computed it, in the order of the calls.
        host_ms: milliseconds of each call on the host; on a CPU that is the time it takes, on a
            GPU the time to launch it. Kernel maps that the call builds are included, the calls of
            layers inside are not.
        device_ms: milliseconds of each call between CUDA events on the GPU; empty elsewhere.
        backward_host_ms, backward_device_ms: sums over all backward passes.
        backward_nodes: how many nodes of the gradient's graph those ran.
        peak_bytes: how far a call raised the allocated bytes of the GPU at most; None elsewhere.
        output_bytes: features of the last call's result.
    """

    name: str
    module: str
    framework: str
    kind: str
    kernel: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    calls: int = 0
    bridged: int = 0
    original: dict[str, int] = dataclasses.field(default_factory=dict)
    rows_in: int | None = None
    rows_out: int | None = None
    channels_in: int | None = None
    channels_out: int | None = None
    offsets: int | None = None
    dataflows: tuple[str, ...] = ()
    host_ms: tuple[float, ...] = ()
    device_ms: tuple[float, ...] = ()
    backward_host_ms: float = 0.0
    backward_device_ms: float = 0.0
    backward_nodes: int = 0
    peak_bytes: int | None = None
    output_bytes: int | None = None

    def __repr__(self) -> str:
        """What a row of the table says of it, on one line."""
        rows = f", {self.rows_in:,} > {self.rows_out:,} rows" if None not in (self.rows_in, self.rows_out) else ""
        widths = f", {self.channels_in} > {self.channels_out} channels" if self.channels_out is not None else ""
        flow = f", {self.dataflow}" if self.dataflow else ""
        return f"<LayerProfile {self.name}: {self.kind}{rows}{widths}{flow}, {self.median_ms:.2f} ms x {self.calls}>"

    @property
    def median_ms(self) -> float:
        """Of the calls: on the GPU where there are its times, else on the host."""
        return statistics.median(self.device_ms or self.host_ms or (0.0,))

    def time(self, on_device: bool) -> float:
        """Milliseconds of all calls, forward and backward."""
        if on_device:
            return sum(self.device_ms) + self.backward_device_ms
        return sum(self.host_ms) + self.backward_host_ms

    @property
    def total_ms(self) -> float:
        """Of all calls, forward and backward: on the GPU where there are its times."""
        return self.time(bool(self.device_ms))

    @property
    def memory(self) -> int:
        """Bytes: `peak_bytes` on a GPU, else `output_bytes`."""
        return (self.output_bytes if self.peak_bytes is None else self.peak_bytes) or 0

    @property
    def dataflow(self) -> str:
        """What computed it; "original" where the framework itself did."""
        return ", ".join([*self.dataflows, *(["original"] if self.original else [])])


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over a profile, in milliseconds.

    calls: of the model (of outermost modules without one).  host_ms, device_ms: of those, forward;
    device_ms is None without a GPU.  backward_host_ms, backward_device_ms: of all layers.
    between_ms: what the model spends outside of the layers listed, forward, on the GPU where there
    is one, else on the host.  peak_bytes: as of a layer, of a whole call.
    """

    calls: int
    host_ms: float
    device_ms: float | None
    backward_host_ms: float
    backward_device_ms: float | None
    between_ms: float
    peak_bytes: int | None

    @property
    def ms(self) -> float:
        """Forward and backward, on the GPU where there is one, else on the host."""
        if self.device_ms is not None:
            return self.device_ms + (self.backward_device_ms or 0.0)
        return self.host_ms + self.backward_host_ms


def values(title: str, layers: Sequence[LayerProfile], totals: Totals) -> dict[str, Any]:
    """As JSON values."""
    on_device = totals.device_ms is not None
    described = []
    for layer in layers:
        facts = dataclasses.asdict(layer)
        facts["share"] = _share(layer.time(on_device), totals)
        described.append(facts)
    return {"model": title, "layers": described, "totals": dataclasses.asdict(totals)}


def as_json(facts: dict[str, Any]) -> str:
    """The text of `values`."""
    return json.dumps(facts, indent=1)


def _share(time: float, totals: Totals) -> float:
    return time / totals.ms if totals.ms else 0.0


def table(title: str, layers: Sequence[LayerProfile], totals: Totals) -> Table:
    """One row per layer, in the order of the first calls, then the sums."""
    on_device = totals.device_ms is not None
    rows = [_row(layer, totals, on_device) for layer in layers]
    backward = totals.backward_device_ms if on_device else totals.backward_host_ms
    between = _sum_row("between layers", ("", ""), "", _percent(totals.between_ms, totals))
    between[_column_index("device ms" if on_device else "host ms")] = f"{totals.between_ms:,.2f}"
    whole = _sum_row(
        "all",
        (f"{totals.host_ms:,.2f}", "" if totals.device_ms is None else f"{totals.device_ms:,.2f}"),
        f"{backward:,.2f}" if backward else "",
        "100%",
    )
    whole[_column_index("calls")] = str(totals.calls)
    whole[_column_index("MiB")] = megabytes(totals.peak_bytes)
    peaks = any(layer.peak_bytes is not None for layer in layers)
    left = sum(sum(layer.original.values()) for layer in layers)
    remark = (
        f"{len(layers)} layer{'s' * (len(layers) != 1)}. Times are sums over all calls, with the building of kernel "
        "maps; "
        f"{'the share is of the GPU' if on_device else 'the share is of the host'}. MiB: "
        f"{'peak of a call' if peaks else 'features of a result'}."
    )
    if left:
        remark += f" {left} calls were left to the original framework."
    return Table(f"Profile of {title}", _COLUMNS, rows, [between, whole], remark)


def _column_index(name: str) -> int:
    return next(i for i, column in enumerate(_COLUMNS) if column.name == name)


def _percent(time: float, totals: Totals) -> str:
    return f"{_share(time, totals):.1%}"


def _sum_row(name: str, forward: tuple[str, str], backward: str, share: str) -> list[str]:
    row = [""] * len(_COLUMNS)
    row[0], row[_column_index("share")] = name, share
    row[_column_index("host ms")], row[_column_index("device ms")] = forward
    row[_column_index("backward")] = backward
    return row


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _row(layer: LayerProfile, totals: Totals, on_device: bool) -> list[str]:
    backward = layer.backward_device_ms if on_device else layer.backward_host_ms
    channels = [layer.channels_in, layer.channels_out]
    return [
        layer.name,
        layer.kind,
        _count(layer.rows_in),
        _count(layer.rows_out),
        " > ".join(str(number) for number in channels if number is not None),
        layer.dataflow,
        str(layer.calls),
        f"{sum(layer.host_ms):,.2f}",
        f"{sum(layer.device_ms):,.2f}" if layer.device_ms else "",
        f"{backward:,.2f}" if layer.backward_nodes else "",
        _percent(layer.time(on_device), totals),
        megabytes(layer.memory),
        layer.framework,
        times(layer.kernel),
        times(layer.stride),
        _count(layer.offsets),
    ]
