"""A synthetic street seen by a 64-beam lidar: something to try without downloading a data set."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from .raycast import RayImage
from .street import GROUND, KINDS, MATERIAL, MIDDLE, ROAD, SIDE, SIDE_WALK, SQUARE, WALK, CarBody, street

__all__ = ["KINDS", "LabelledScan", "labelled_scan", "street_scan"]


_HEADING = 0.16  # the car is not quite parallel to the street, radians
_REACH, _NEAREST = 100.0, 2.6  # metres within which an echo is kept


@dataclasses.dataclass(frozen=True)
class LabelledScan:
    """A scan, and what its points belong to.

    Attributes:
        points: [N, 4] float32, as `street_scan` returns them.
        kinds: [N] int64, indices of `KINDS`.
        cars: [M, 7] float64, all cars, seen or hidden: centre x, y, z, length, width, height in
            metres, and heading in radians, in the frame of the points.
    """

    points: npt.NDArray[np.float32]
    kinds: npt.NDArray[np.int64]
    cars: npt.NDArray[np.float64]


def street_scan(seed: int = 0, azimuths: int = 2000) -> npt.NDArray[np.float32]:
    """One revolution of a 64-beam lidar (+2 to -24.3 degrees) at a crossing of two streets.

    Args:
        seed: the same seed gives the same scan, bit for bit, with the same NumPy.
        azimuths: firings per revolution; at most `64 * azimuths` points come back.

    Returns:
        [N, 4] float32: x forward, y left, z up in metres from the sensor, and intensity in [0, 1];
        beam after beam.
    """
    return labelled_scan(seed, azimuths).points


def labelled_scan(seed: int = 0, azimuths: int = 2000) -> LabelledScan:
    """The scan of `street_scan` with the kind of every point and the boxes of the cars."""
    rng = np.random.default_rng(seed)
    # Two laser blocks of 32 beams, 1/3 and 1/2 degree apart, like the sensor of many public sets.
    degrees = np.concatenate([2.0 - np.arange(32) / 3, -8.83 - np.arange(32) / 2])
    elevation = np.radians(degrees + rng.normal(0, 0.03, 64))
    image = RayImage(elevation, azimuths, rng)
    _cast_ground(image)
    cars = []
    for name, solid in street(rng):
        image.add(solid, KINDS.index(name))
        if isinstance(solid, CarBody):
            cars.append(_car_box(solid))
    points, hits = _echoes(image, rng)
    return LabelledScan(points, image.category[hits].astype(np.int64), np.array(cars))


def _car_box(body: CarBody) -> tuple[float, ...]:
    """One row of `LabelledScan.cars`."""
    cos, sin = np.cos(_HEADING), np.sin(_HEADING)
    x, y, _ = body.center
    length, width, _ = body.size
    middle = GROUND + body.roof / 2
    return (cos * x - sin * y, sin * x + cos * y, middle, length, width, body.roof, body.yaw + _HEADING)


def _echoes(image: RayImage, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Turn the ideal image into a measurement: losses, range noise, intensity steps of 0.01.

    Returns the points and the mask of the rays that they are the echoes of.
    """
    t, shape = image.t, image.t.shape
    # Far and grazing echoes are weak; weak echoes get lost.
    with np.errstate(invalid="ignore", over="ignore"):
        strength = image.reflectivity * np.sqrt(np.clip(image.cosine, 0.01, 1))
        strength /= 1 + (t / 60) ** 2
    lost = image.dropout + 0.35 * np.exp(-strength / 0.012)
    hits = np.isfinite(t) & (t < _REACH) & (t > _NEAREST) & (rng.random(shape) > lost)
    distance = t[hits] + rng.normal(0, 0.015, int(hits.sum())).astype(np.float32)
    x, y, z = image.dirs[:, hits] * distance
    cos, sin = np.cos(_HEADING), np.sin(_HEADING)
    intensity = image.reflectivity[hits] * (0.55 + 0.45 * np.sqrt(np.clip(image.cosine[hits], 0, 1)))
    intensity = intensity * (1 + rng.normal(0, 0.12, len(distance)))
    intensity = np.round(np.clip(intensity, 0, 0.99), 2)
    points = np.stack([cos * x - sin * y, sin * x + cos * y, z, intensity], 1).astype(np.float32)
    return points, hits


def _cast_ground(image: RayImage) -> None:
    """Slightly undulating carriageways with paint and a zebra crossing; grass beyond."""
    dx, dy, dz = image.dirs
    down = dz < -1e-3
    slope = np.where(down, dz, -1.0)
    t = GROUND / slope
    for _ in range(3):  # far flatter than the beams: a few rounds of substitution settle it
        x, y = t * dx, t * dy
        t = (GROUND + 0.035 * np.sin(x / 11) + 0.03 * np.sin(y / 7 + x / 29)) / slope
    x, y = t * dx, t * dy - MIDDLE
    across = np.abs(y)
    side = (x > SIDE[0]) & (x < SIDE[1])
    paint = ((across < 0.08) & (x % 6 < 3) | (np.abs(across - 4.3) < 0.07)) & ~side
    paint |= side & (np.abs(x - sum(SIDE) / 2) < 0.08) & (y % 6 < 3) & (across > WALK)
    zebra = (np.abs(x - SIDE[0] + 3) < 1.5) & (across < ROAD) & (y % 1 < 0.5)
    grass = (across > WALK) & ((x < SIDE[0] - SIDE_WALK) | (x > SQUARE[0]))
    image.t[:] = np.where(down, t, np.inf)
    image.cosine[:] = np.abs(dz)
    image.reflectivity[:] = MATERIAL["asphalt"].reflectivity
    image.reflectivity[grass] = 0.42
    image.category[grass] = KINDS.index("grass")
    image.reflectivity[paint | zebra] = 0.85
    image.dropout[:] = 0.02
