"""A synthetic street seen by a 64-beam lidar: something to try without downloading a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .raycast import Box, Cylinder, Ellipsoid, RayImage, Surface

__all__ = ["street_scan"]

_GROUND = -1.73  # metres below the sensor, the roof of a passenger car
_MIDDLE = 1.9  # y of the street's centre line: the car keeps to the right lane
_ROAD, _WALK = 6.6, 12.4  # half widths of the carriageway and of the whole street, metres
_SIDE, _SIDE_WALK = (10.0, 23.0), 4.0  # x range of the side street; width of its pavements
_HEADING = 0.16  # the car is not quite parallel to the street, radians
_LOT = (-40.0, -13.0)  # x range of the car park on the right
_SQUARE = (_SIDE[1] + _SIDE_WALK, 74.0)  # x range of the square ahead on the left
_SQUARE_DEPTH = 48.0
_REACH, _NEAREST = 100.0, 2.6  # metres within which an echo is kept
_MATERIAL = {
    "asphalt": Surface(0.24),
    "pavement": Surface(0.36),
    "trunk": Surface(0.32),
    "crown": Surface(0.46, dropout=0.08, depth=0.9),
    "hedge": Surface(0.42, dropout=0.05, depth=0.18),
    "pole": Surface(0.5),
    "sign": Surface(0.97),
    "cloth": Surface(0.4, dropout=0.05),
    "tyre": Surface(0.06, dropout=0.15),
    "glass": Surface(0.1, dropout=0.35),
}

Solids = Iterator[Box | Cylinder | Ellipsoid]


def street_scan(seed: int = 0, azimuths: int = 2000) -> npt.NDArray[np.float32]:
    """One revolution of a 64-beam lidar (+2 to -24.3 degrees) at a crossing of two streets.

    Args:
        seed: the same seed gives the same scan, bit for bit, with the same NumPy.
        azimuths: firings per revolution; at most `64 * azimuths` points come back.

    Returns:
        [N, 4] float32: x forward, y left, z up in metres from the sensor, and intensity in [0, 1];
        beam after beam.
    """
    rng = np.random.default_rng(seed)
    # Two laser blocks of 32 beams, 1/3 and 1/2 degree apart, like the sensor of many public sets.
    degrees = np.concatenate([2.0 - np.arange(32) / 3, -8.83 - np.arange(32) / 2])
    elevation = np.radians(degrees + rng.normal(0, 0.03, 64))
    image = RayImage(elevation, azimuths, rng)
    _cast_ground(image)
    for solid in _street(rng):
        image.add(solid)
    return _echoes(image, rng)


def _echoes(image: RayImage, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Turn the ideal image into a measurement: losses, range noise, intensity steps of 0.01."""
    t, shape = image.t, image.t.shape
    # Far and grazing echoes are weak; weak echoes get lost.
    with np.errstate(invalid="ignore", over="ignore"):
        strength = image.reflectivity * np.sqrt(np.clip(image.cosine, 0.01, 1))
        strength /= 1 + (t / 60) ** 2
    lost = image.dropout + 0.35 * np.exp(-strength / 0.012)
    kept = np.isfinite(t) & (t < _REACH) & (t > _NEAREST) & (rng.random(shape) > lost)
    distance = t[kept] + rng.normal(0, 0.015, int(kept.sum())).astype(np.float32)
    x, y, z = image.dirs[:, kept] * distance
    cos, sin = np.cos(_HEADING), np.sin(_HEADING)
    intensity = image.reflectivity[kept] * (
        0.55 + 0.45 * np.sqrt(np.clip(image.cosine[kept], 0, 1))
    )
    intensity = intensity * (1 + rng.normal(0, 0.12, len(distance)))
    intensity = np.round(np.clip(intensity, 0, 0.99), 2)
    return np.stack([cos * x - sin * y, sin * x + cos * y, z, intensity], 1).astype(np.float32)


def _cast_ground(image: RayImage) -> None:
    """Slightly undulating carriageways with paint and a zebra crossing; grass beyond."""
    dx, dy, dz = image.dirs
    down = dz < -1e-3
    slope = np.where(down, dz, -1.0)
    t = _GROUND / slope
    for _ in range(3):  # far flatter than the beams: a few rounds of substitution settle it
        x, y = t * dx, t * dy
        t = (_GROUND + 0.035 * np.sin(x / 11) + 0.03 * np.sin(y / 7 + x / 29)) / slope
    x, y = t * dx, t * dy - _MIDDLE
    across = np.abs(y)
    side = (x > _SIDE[0]) & (x < _SIDE[1])
    paint = ((across < 0.08) & (x % 6 < 3) | (np.abs(across - 4.3) < 0.07)) & ~side
    paint |= side & (np.abs(x - sum(_SIDE) / 2) < 0.08) & (y % 6 < 3) & (across > _WALK)
    zebra = (np.abs(x - _SIDE[0] + 3) < 1.5) & (across < _ROAD) & (y % 1 < 0.5)
    grass = (across > _WALK) & ((x < _SIDE[0] - _SIDE_WALK) | (x > _SQUARE[0]))
    image.t[:] = np.where(down, t, np.inf)
    image.cosine[:] = np.abs(dz)
    image.reflectivity[:] = _MATERIAL["asphalt"].reflectivity
    image.reflectivity[grass] = 0.42
    image.reflectivity[paint | zebra] = 0.85
    image.dropout[:] = 0.02


def _street(rng: np.random.Generator) -> Solids:
    """Everything that stands on the ground."""
    yield from _pavements()
    yield from _houses(rng)
    yield from _parked_cars(rng)
    yield from _avenue(rng)
    yield from _square(rng)
    yield from _car_park(rng)
    yield from _traffic(rng)
    yield from _people(rng)
    for side in (-1, 1):
        yield from _street_furniture(rng, side)


def _standing(
    x: float, y: float, size: tuple[float, float, float], surface: Surface, bottom: float = 0.0
) -> Box:
    """A box whose underside is `bottom` metres above the road."""
    return Box((x, y, _GROUND + bottom + size[2] / 2), size, surface)


def _pavements() -> Solids:
    """Raised slabs: their edges are the kerbs."""
    width = _WALK - _ROAD
    for side in (-1, 1):
        for low, high in ((-100.0, _SIDE[0]), (_SIDE[1], 100.0)):
            y = _MIDDLE + side * (_ROAD + width / 2)
            yield _standing((low + high) / 2, y, (high - low, width, 0.16), _MATERIAL["pavement"])
        for x in (_SIDE[0] - _SIDE_WALK / 2, _SIDE[1] + _SIDE_WALK / 2):
            size = (_SIDE_WALK, 90.0, 0.16)
            yield _standing(x, _MIDDLE + side * (_WALK + 45), size, _MATERIAL["pavement"])


def _houses(rng: np.random.Generator) -> Solids:
    """House fronts along both streets, around the square and behind the car park."""
    left, right = _MIDDLE + _WALK, _MIDDLE - _WALK
    near, far = _SIDE[0] - _SIDE_WALK, _SIDE[1] + _SIDE_WALK
    yield from _row(rng, "x", (-96, near), left, 1)
    yield from _row(rng, "x", (-96, _LOT[0]), right, -1)
    yield from _row(rng, "x", (_LOT[1], near), right, -1)
    yield from _row(rng, "x", (far, 96), right, -1)
    yield from _row(rng, "x", (_SQUARE[1], 96), left, 1)
    yield from _row(rng, "x", (_SQUARE[0], _SQUARE[1]), left + _SQUARE_DEPTH, 1)
    yield from _row(rng, "x", _LOT, right - 32, -1)
    for edge, away in ((near, -1), (far, 1)):
        yield from _row(rng, "y", (right - 80, right - 14), edge, away)
    yield from _row(rng, "y", (left + 14, left + 80), near, -1)
    yield from _row(rng, "y", (left + _SQUARE_DEPTH + 8, left + 80), far, 1)


def _row(
    rng: np.random.Generator, axis: str, span: tuple[float, float], front: float, away: int
) -> Solids:
    """Terraced houses over `span` of `axis`, facing `front`, with bays that stand out."""
    at, end = span
    while end - at > 4:
        length, depth = min(rng.uniform(9, 19), end - at), rng.uniform(9, 13)
        height, setback = rng.uniform(7, 19), rng.uniform(0, 1.2)
        wall = Surface(rng.uniform(0.25, 0.6), windows=True)
        plinth = dataclasses.replace(wall, windows=False)
        line, middle = front + away * setback, at + length / 2
        parts = [(middle, line + away * depth / 2, length, depth, height, wall)]
        parts.append((middle, line, length, 0.3, 0.8, plinth))
        for bay in np.arange(at + 2.2, at + length - 2.2, rng.uniform(4.2, 6.5)):
            out, wide = rng.uniform(0.4, 0.9), rng.uniform(1.4, 2.6)
            parts.append((float(bay), line, wide, 2 * out, height * rng.uniform(0.6, 0.95), wall))
        for along, across, wide, deep, high, surface in parts:
            if axis == "x":
                yield _standing(along, across, (wide, deep, high), surface)
            else:
                yield _standing(across, along, (deep, wide, high), surface)
        at += length + (rng.uniform(2.0, 4.5) if rng.random() < 0.25 else 0.02)


def _car(rng: np.random.Generator, x: float, y: float, yaw: float) -> Solids:
    """Body, cabin and wheels of a passenger car or, now and then, a van."""
    van = rng.random() < 0.15
    length, width = (5.3, 2.0) if van else (rng.uniform(3.8, 4.8), rng.uniform(1.7, 1.9))
    body_top, roof = (1.15, 2.35) if van else (rng.uniform(0.78, 0.92), rng.uniform(1.4, 1.62))
    cabin, shift = (0.8, -0.35) if van else (rng.uniform(0.48, 0.6), rng.uniform(-0.45, -0.1))
    paint = Surface(float(rng.choice([0.08, 0.2, 0.35, 0.6, 0.8])), dropout=0.06)
    cos, sin = float(np.cos(yaw)), float(np.sin(yaw))

    def part(
        ahead: float, left: float, low: float, size: tuple[float, float, float], surface: Surface
    ) -> Box:
        center = (x + cos * ahead - sin * left, y + sin * ahead + cos * left)
        return Box((*center, _GROUND + low + size[2] / 2), size, surface, yaw)

    yield part(0, 0, 0.22, (length, width, body_top - 0.22), paint)
    glass = paint if van else _MATERIAL["glass"]
    yield part(shift, 0, body_top, (length * cabin, width * 0.9, roof - body_top - 0.06), glass)
    yield part(shift, 0, roof - 0.06, (length * cabin * 0.86, width * 0.86, 0.06), paint)
    for ahead in (-0.3 * length, 0.3 * length):
        for left in (-0.45 * width, 0.45 * width):
            yield part(ahead, left, 0, (0.62, 0.2, 0.62), _MATERIAL["tyre"])


def _parked_cars(rng: np.random.Generator) -> Solids:
    """Cars along the kerbs of both streets."""
    for side in (-1, 1):
        for x in np.arange(-81.0, 81.0, 6.2):
            # A gap beside the sensor: cars there would hide half of the street.
            if not -9 < x < _SIDE[1] + 7 and rng.random() < 0.55:
                lane = _MIDDLE + side * (_ROAD - 1.1 + rng.normal(0, 0.08))
                turn = (0.0 if side < 0 else np.pi) + rng.normal(0, 0.03)
                yield from _car(rng, float(x + rng.uniform(-0.5, 0.5)), lane, turn)
        for y in np.arange(_WALK + 7, 75.0, 6.4):
            for kerb, away in ((_SIDE[0], 1), (_SIDE[1], -1)):
                if rng.random() < 0.5:
                    lane = kerb + away * (1.1 + rng.normal(0, 0.08))
                    yield from _car(rng, lane, _MIDDLE + side * float(y), -away * np.pi / 2)


def _traffic(rng: np.random.Generator) -> Solids:
    """Cars under way: in the own lane, oncoming, waiting in the side street, turning."""
    for x in (32.0, 55.0, -12.5, -37.0):
        yield from _car(rng, x, _MIDDLE - 2.0, rng.normal(0, 0.02))
    for x in (16.0, -21.5, 41.0, 66.0):
        yield from _car(rng, x, _MIDDLE + 2.0, np.pi + rng.normal(0, 0.02))
    for y in (_WALK + 1.5, _WALK + 8.0, _WALK + 14.5):
        yield from _car(rng, 14.2, _MIDDLE + y, -np.pi / 2 + rng.normal(0, 0.02))
    yield from _car(rng, 18.8, _MIDDLE - _WALK - 3, np.pi / 2)
    yield from _car(rng, 21.0, _MIDDLE - 3.5, -np.pi / 3)  # turning


def _car_park(rng: np.random.Generator) -> Solids:
    """Two rows of cars, nose to nose, in a gap between the houses."""
    for row, yaw in ((14.0, np.pi / 2), (25.0, -np.pi / 2)):
        for x in np.arange(_LOT[0] + 2, _LOT[1] - 1, 2.7):
            if rng.random() < 0.6:
                y = _MIDDLE - _WALK - row + 8 + rng.normal(0, 0.15)
                yield from _car(rng, float(x), float(y), yaw + rng.normal(0, 0.03))


def _tree(rng: np.random.Generator, x: float, y: float) -> Solids:
    trunk, wide, high = rng.uniform(2.2, 3.4), rng.uniform(1.5, 2.8), rng.uniform(1.4, 2.4)
    center = (x, y, _GROUND + trunk / 2)
    yield Cylinder(center, rng.uniform(0.1, 0.22), trunk, _MATERIAL["trunk"])
    for _ in range(3):  # overlapping lobes give an uneven outline
        dx, dy, dz = rng.normal(0, 0.45, 3)
        lobe = (x + dx, y + dy, _GROUND + trunk + 0.7 * high + dz)
        yield Ellipsoid(lobe, (wide * 0.8, wide * 0.8, high), _MATERIAL["crown"])


def _avenue(rng: np.random.Generator) -> Solids:
    """Trees along the kerbs."""
    for side in (-1, 1):
        for x in np.arange(-84.0, 84.0, 11.0) + 4.0 * (side < 0):
            if not _SIDE[0] - 6 < x < _SIDE[1] + 6 and rng.random() < 0.8:
                spot = float(x + rng.normal(0, 0.7))
                yield from _tree(rng, spot, _MIDDLE + side * (_ROAD + 1.3))
        for y in np.arange(_WALK + 10, 80.0, 13.0):
            for x in (_SIDE[0] - 1.2, _SIDE[1] + 1.2):
                if rng.random() < 0.6:
                    yield from _tree(rng, x, _MIDDLE + side * float(y))


def _square(rng: np.random.Generator) -> Solids:
    """Grass behind hedges, with trees and a low wall scattered over it."""
    low, high = _SQUARE
    edge = _MIDDLE + _WALK + 0.6
    for share in (0.22, 0.78):  # the gap in the middle is the entrance
        x = low + share * (high - low)
        yield _standing(x, edge, (0.36 * (high - low), 0.9, 0.9), _MATERIAL["hedge"])
    for _ in range(18):
        x, y = rng.uniform(low + 3, high - 3), edge + rng.uniform(4, _SQUARE_DEPTH - 4)
        yield from _tree(rng, float(x), float(y))
    for _ in range(5):
        x, y = rng.uniform(low + 4, high - 8), edge + rng.uniform(6, _SQUARE_DEPTH - 8)
        size = (float(rng.uniform(2, 5)), float(rng.uniform(0.6, 3)), 0.6)
        yield _standing(float(x), float(y), size, _MATERIAL["hedge"])


def _street_furniture(rng: np.random.Generator, side: int) -> Solids:
    """Lamp posts, sign posts and boxes along the kerb."""
    y = _MIDDLE + side * (_ROAD + 0.5)
    for x in np.arange(-80.0, 80.0, 18.0) + 6 * side:
        yield Cylinder((float(x), y, _GROUND + 3.5), 0.09, 7.0, _MATERIAL["pole"])
    for x in (*rng.uniform(-50, 50, 5), _SIDE[0] - 1.2, _SIDE[1] + 1.2):
        yield Cylinder((float(x), y + 0.4 * side, _GROUND + 1.3), 0.04, 2.6, _MATERIAL["pole"])
        yield _standing(float(x), y + 0.4 * side, (0.06, 0.62, 0.62), _MATERIAL["sign"], 2.1)
    for x in rng.uniform(-60, 60, 4):
        size = (float(rng.uniform(0.5, 1.4)), 0.5, float(rng.uniform(0.8, 1.4)))
        yield _standing(float(x), _MIDDLE + side * (_WALK - 0.6), size, Surface(0.3))


def _people(rng: np.random.Generator) -> Solids:
    """Pedestrians on both pavements, on the zebra crossing and in the square."""
    spots: list[tuple[float, float]] = [
        (float(rng.uniform(-35, 50)), s * rng.uniform(8.4, 11.6)) for s in (-1, 1) * 12
    ]
    spots += [(_SIDE[0] - 3.2 + float(rng.normal(0, 0.5)), y) for y in (-2.9, 0.9, 4.4)]
    spots += [(rng.uniform(28, 50), _WALK + rng.uniform(3, 25)) for _ in range(6)]
    for x, y in spots:
        size = rng.uniform(0.92, 1.08)
        for leg in (-0.11, 0.11):
            center = (x + leg, _MIDDLE + y, _GROUND + 0.42 * size)
            yield Cylinder(center, 0.08, 0.84 * size, _MATERIAL["cloth"])
        torso = (x, _MIDDLE + y, _GROUND + 1.12 * size)
        yield Ellipsoid(torso, (0.25, 0.25, 0.38 * size), _MATERIAL["cloth"])
        head = (x, _MIDDLE + y, _GROUND + 1.62 * size)
        yield Ellipsoid(head, (0.11, 0.11, 0.13), Surface(0.35))
