"""The picture of the detection example: boxes in a scan seen from above, precision over recall."""

from __future__ import annotations

import numpy as np
from boxes import RECALLS, Found, average_precision, corners, heading_errors, precisions

from sparse_bridge.tools.demo.birdseye import raster
from sparse_bridge.tools.demo.drawing import INK, legend, metric_panel, new_figure, plain_panel, save

SHOWN = 0.3  # boxes with a lower score are not drawn


def line(colour: str, style: str, width: float) -> dict:
    return {"color": colour, "linestyle": style, "linewidth": width}


# Styles differ too: colours alone do not tell boxes apart for everybody.
BOXES = {
    "true car": line(INK, "dashed", 1.0),
    "too few echoes": line("#8a63c9", "solid", 1.0),
    "missed": line("#f0e442", "dotted", 2.6),
    "false alarm": line("#e2500f", "dashdot", 2.2),
    "found": line("#56b4e9", "solid", 2.2),
}
# The lower the threshold, the wider: curves that lie on each other all show.
CURVES = {0.3: line("#56b4e9", "solid", 6.5), 0.5: line("#e69f00", "solid", 3.2), 0.7: line(INK, "dashed", 1.6)}


def draw(args, points: np.ndarray, found: list[Found], scene: tuple[float, ...]) -> None:
    """The first scan with its boxes, a close-up of it, and precision over recall of all scans.

    scene: lowest and highest x, lowest and highest y that are shown, in metres.
    """
    precision = {threshold: average_precision(found, threshold) for threshold in CURVES}
    score = f"AP {precision[0.7]:.2f} at IoU 0.7, {precision[0.5]:.2f} at 0.5"
    title = f"{score}, cars of streets that it has not seen ({args.model} SECOND)"
    figure = new_figure((15, 19), title)
    rows = [["scene", "scene"], ["near", "curves"]]
    panels = figure.subplot_mosaic(rows, height_ratios=[1.7, 1])
    of_first, half = found[0], 9.0
    shown = Found(
        *(part[of_first.scores > SHOWN] for part in (of_first.boxes, of_first.scores)), of_first.cars, of_first.counted
    )
    car = shown.matches(0.5)
    right, wrong = (car >= 0) & shown.counted[car], car < 0
    title = (
        f"{right.sum()} of {shown.counted.sum()} cars found, {wrong.sum()} false alarm(s) "
        f"(score above {SHOWN}, IoU above 0.5)"
    )
    drawn = draw_boxes(panels["scene"], points, shown, scene, title)
    crowd = bev_crowd(shown.cars[shown.counted], half)
    extent = (crowd[0] - half, crowd[0] + half, crowd[1] - half, crowd[1] + half)
    draw_boxes(panels["near"], points, shown, extent, "close-up of the first scan")
    for threshold, look in CURVES.items():
        label = f"IoU {threshold}: AP {precision[threshold]:.2f}"
        panels["curves"].plot(RECALLS, precisions(found, threshold), label=label, **look)
    turns = heading_errors(found)
    off = f"headings off by {np.median(turns):.1f}° (median)" if len(turns) else "no car found"
    name = f"{len(found)} scans; {off}"
    plain_panel(panels["curves"], name, "recall", "precision")
    panels["curves"].set(xlim=(0, 1), ylim=(0, 1.02))
    panels["curves"].legend(loc="lower left", facecolor="#05070c", labelcolor=INK, fontsize=13)
    looks = {name: look for name, look in BOXES.items() if name in drawn}
    legend(figure, looks, loc="outside lower center", ncols=len(looks), handlelength=4)
    save(figure, args.picture)


def draw_boxes(axes, points: np.ndarray, shown: Found, extent, title: str) -> list[str]:
    """The scan from above, true and found boxes; a line leads from a centre to an end of a car.

    Returns which of `BOXES` there are.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    x, y = points[:, 0], points[:, 1]
    inside = (x > extent[0]) & (x < extent[1]) & (y > extent[2]) & (y < extent[3])
    height = raster(points[inside, :3], points[inside, 2], extent, (extent[1] - extent[0]) / 400)
    grey = {"cmap": "bone", "vmin": -4.0, "vmax": 3.0, "interpolation": "nearest"}
    axes.imshow(height, extent=extent, origin="lower", **grey)
    car, of_cars, found = shown.matches(0.5), corners(shown.cars), corners(shown.boxes)
    boxes = {
        "true car": of_cars[shown.counted],
        "too few echoes": of_cars[~shown.counted],
        "missed": of_cars[np.setdiff1d(np.flatnonzero(shown.counted), car)],
        "false alarm": found[car < 0],
        "found": found[car >= 0],
    }
    for name, outlines in boxes.items():
        look = {f"{key}s": value for key, value in BOXES[name].items() if key != "color"}
        colour = {"facecolors": "none", "edgecolors": BOXES[name]["color"]}
        axes.add_collection(PolyCollection(outlines, **colour, **look))
    lines = np.stack([shown.boxes[:, :2], found[:, :2].mean(1)], 1)
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=1.0))
    metric_panel(axes, title, extent)
    return [name for name, outlines in boxes.items() if len(outlines)]


def bev_crowd(cars: np.ndarray, half: float) -> np.ndarray:
    """The car [2] that has most others within `half` metres."""
    near = np.abs(cars[:, None, :2] - cars[None, :, :2]).max(-1) < half
    return cars[near.sum(1).argmax(), :2]
