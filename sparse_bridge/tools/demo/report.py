"""The demo's tables."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ... import _version, settings
from ...tables import fitting, megabytes, times
from ..profiling.results import LayerProfile
from .points import PointCloud
from .profile import NetworkProfile
from .segmentation import CLASSES, Labelled
from .training import TrainingResult
from .voxels import VoxelGrid

if TYPE_CHECKING:
    from ...adapters.lifecycle import FrameworkStatus

_FLOW_STYLE = {
    **{name: "green" if traits.kernels else "cyan" for name, traits in settings.DATAFLOWS.items()},
    "mm": "blue",
    "original": "magenta",
}


def _number(values: Sequence[int]) -> str:
    """One number where all axes agree."""
    return str(values[0]) if len(set(values)) == 1 else times(values)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def facts_table(cloud: PointCloud, grid: VoxelGrid, device: torch.device, dtype: str, status: FrameworkStatus) -> Table:
    """The scan, its grid and the machine."""
    table = Table(title="Scan", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    z, y, x = grid.shape
    size = grid.voxel_size
    count = len(grid.features)
    points = f"{len(cloud.points):,} points"
    if cloud.dropped:
        points += f" ({cloud.dropped:,} more were NaN, infinite or beyond float32 and dropped)"
    table.add_row("source", escape(f"{cloud.source}, {points}"))
    if any(cloud.origin):
        x0, y0, z0 = (f"{value:,.0f}" for value in cloud.origin)
        table.add_row("origin", f"{x0}, {y0}, {z0} m (x, y, z), subtracted from all positions")
    table.add_row(
        "voxels",
        f"{count:,} of {size * 100:g} cm from {grid.points_inside:,} points inside the crop "
        f"({grid.points_inside / count:.1f} per voxel)",
    )
    table.add_row(
        "grid",
        f"{x} x {y} x {z} cells (x, y, z), {x * size:.1f} x {y * size:.1f} x {z * size:.1f} m, "
        f"{count / (x * y * z):.3%} occupied",
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    threads = "" if device.type == "cuda" else f", threads: {torch.get_num_threads()}"
    table.add_row("device", f"{device.type} {name}".strip() + threads + f", {dtype}")
    table.add_row(
        "versions",
        f"sparse_bridge {_version.described()}, torch {torch.__version__}, "
        f"triton {_version_of('triton')}, Python {platform.python_version()}",
    )
    table.add_row("spconv", escape(f"{status.version}, {status.mode}: {status.reason}"))
    return table


def layers_table(profile: NetworkProfile, device: torch.device, width: int) -> Table:
    """One row per sparse layer, then the sum; the columns that `width` characters have room for."""
    memory = "peak +MB" if device.type == "cuda" else "output MB"
    total = sum(layer.median_ms for layer in profile.layers)
    largest = max((layer.memory for layer in profile.layers), default=0)
    summary = ["all layers", *[""] * 7, f"{total:,.2f}", f"max {megabytes(largest)}"]
    rows: list[Sequence[str | Text]] = [*map(_cells, profile.layers), summary]
    columns = _fitting([*_COLUMNS, memory], rows, width)
    table = Table(
        title=f"{profile.title}: {len(profile.layers)} sparse layers, {profile.parameters / 1e6:.2f} M parameters",
        title_justify="left",
        caption="ms: median of each layer, with the building of kernel maps, in passes of their\n"
        "own that time every layer; the sum need not be the time of a whole pass",
        caption_justify="left",
    )
    for index in columns:
        words = index in _WORDS
        table.add_column([*_COLUMNS, memory][index], justify="left" if words else "right", no_wrap=True)
    for layer, cells in zip(profile.layers, rows, strict=False):
        if layer.kind not in ("submanifold", "pointwise"):
            table.add_section()  # the voxels change: a new resolution begins
        table.add_row(*(cells[index] for index in columns))
    table.add_section()
    table.add_row(*(summary[index] for index in columns), style="bold")
    return table


_COLUMNS = ("layer", "kind", "kernel", "stride", "voxels in", "voxels out", "channels", "dataflow", "ms")
_WORDS = (0, 1, 7)  # columns that are read from the left
# Columns that a narrow terminal does without, as of `tables.Column`.
_SPARE = {4: 5, 3: 4, 9: 3, 2: 2, 1: 1}


def _fitting(names: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> list[int]:
    """The columns that fit into `width` characters whole."""
    needed = {index: max(len(name), *(len(row[index]) for row in rows)) for index, name in enumerate(names)}
    return sorted(fitting(needed, {index: _SPARE.get(index, 0) for index in needed}, width))


def _cells(layer: LayerProfile) -> list[str | Text]:
    style = _FLOW_STYLE.get(layer.dataflow, "")
    return [
        layer.name,
        layer.kind,
        times(layer.kernel),
        _number(layer.stride or ()),
        f"{layer.rows_in:,}",
        f"{layer.rows_out:,}",
        f"{layer.channels_in} > {layer.channels_out}",
        Text(layer.dataflow, style=style),
        f"{layer.median_ms:,.2f}",
        megabytes(layer.memory),
    ]


_BUSY = 1.5  # slowest by fastest repeat; on an idle machine they differ by some per cent


def times_table(profiles: Sequence[NetworkProfile], trained: Sequence[TrainingResult], voxelise_ms: float) -> Table:
    """Times of whole passes."""
    measured: list[NetworkProfile | TrainingResult] = [*profiles, *trained]
    slowest = max((max(row.passes) / min(row.passes) for row in measured), default=1.0)
    caption = "median, and lowest to highest of the repeats" if slowest > 1 else ""
    if slowest > _BUSY:
        caption += f"\nThe machine was busy: repeats of the same work differ by {slowest:.1f}x."
    table = Table(title="Times", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("lowest to highest", justify="right")
    table.add_column("notes")
    table.add_row("voxelise", f"{voxelise_ms:,.1f}", "", "")
    for profile in profiles:
        voxels = profile.layers[0].rows_in or 0
        note = f"{len(profile.layers)} sparse layers, {_rate(voxels, profile.ms)}"
        if profile.peak_memory is not None:
            note += f", peak memory +{megabytes(profile.peak_memory)} MB"
        _add_times(table, f"{profile.title}, inference", profile, note)
    for result in trained:
        losses = " > ".join(f"{loss:.3f}" for loss in result.losses)
        _add_times(table, f"{result.title}, training step", result, f"loss {losses}")
    return table


def _add_times(table: Table, what: str, measured: NetworkProfile | TrainingResult, note: str) -> None:
    ends = f"{min(measured.passes):,.1f} to {max(measured.passes):,.1f}"
    spread = ends if len(measured.passes) > 1 else ""
    table.add_row(what, f"{measured.ms:,.1f}", spread, note)


def _rate(voxels: int, ms: float) -> str:
    """Voxels per second, in thousands where these say enough."""
    rate = 1e3 * voxels / ms
    return f"{rate / 1e3:,.0f} k voxels/s" if rate >= 1e4 else f"{rate:,.0f} voxels/s"


def classes_table(labelled: Labelled) -> Table:
    """What the segmentation network found, per class, against the truth where it is known."""
    iou, classes = labelled.iou(), labelled.classes
    losses = labelled.losses
    table = Table(
        title=f"Labels after {len(losses)} training steps ({labelled.seconds:.1f} s)\n"
        f"on synthetic streets, loss {losses[0]:.2f} > {losses[-1]:.2f}",
        title_justify="left",
        caption="IoU: intersection over union with the\ntruth, on a street that it has not seen"
        if iou is not None
        else "no IoU: this scan has no labels. The network has seen\nstreets alone; elsewhere its labels mean little",
        caption_justify="left",
    )
    table.add_column("class")
    for name in ("voxels found", "voxels", "IoU"):
        table.add_column(name, justify="right")
    truth = labelled.scan.labels
    for index, name in enumerate(CLASSES):
        true = "-" if truth is None else f"{(truth == index).sum():,}"
        share = "-" if iou is None or np.isnan(iou[index]) else f"{iou[index]:.3f}"
        table.add_row(name, f"{(classes == index).sum():,}", true, share)
    if iou is not None:
        table.add_section()
        count = f"{len(classes):,}"
        table.add_row("all, mean IoU", count, count, f"{np.nanmean(iou):.3f}", style="bold")
    return table
