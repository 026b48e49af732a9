"""What stands along the synthetic street: houses, cars, trees and people, as solids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from .raycast import Box, Cylinder, Ellipsoid, Surface

KINDS = ("road", "grass", "pavement", "building", "vegetation", "vehicle", "pole", "person")
GROUND = -1.73  # metres below the sensor, the roof of a passenger car
MIDDLE = 1.9  # y of the street's centre line: the car keeps to the right lane
ROAD, WALK = 6.6, 12.4  # half widths of the carriageway and of the whole street, metres
SIDE, SIDE_WALK = (10.0, 23.0), 4.0  # x range of the side street; width of its pavements
LOT = (-40.0, -13.0)  # x range of the car park on the right
SQUARE = (SIDE[1] + SIDE_WALK, 74.0)  # x range of the square ahead on the left
SQUARE_DEPTH = 48.0
MATERIAL = {
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


@dataclasses.dataclass(frozen=True)
class CarBody(Box):
    """The part of a car that has its outline seen from above; `roof` is the car's height."""

    roof: float = 0.0


def street(rng: np.random.Generator) -> Iterator[tuple[str, Box | Cylinder | Ellipsoid]]:
    """Everything that stands on the ground, with its kind."""
    groups = [
        ("pavement", _pavements()),
        ("building", _houses(rng)),
        ("vehicle", _parked_cars(rng)),
        ("vegetation", _avenue(rng)),
        ("vegetation", _square(rng)),
        ("vehicle", _car_park(rng)),
        ("vehicle", _traffic(rng)),
        ("person", _people(rng)),
        *(("pole", _street_furniture(rng, side)) for side in (-1, 1)),
    ]
    for name, solids in groups:
        for solid in solids:
            yield name, solid


def _standing(x: float, y: float, size: tuple[float, float, float], surface: Surface, bottom: float = 0.0) -> Box:
    """A box whose underside is `bottom` metres above the road."""
    return Box((x, y, GROUND + bottom + size[2] / 2), size, surface)


def _pavements() -> Solids:
    """Raised slabs: their edges are the kerbs."""
    width = WALK - ROAD
    for side in (-1, 1):
        for low, high in ((-100.0, SIDE[0]), (SIDE[1], 100.0)):
            y = MIDDLE + side * (ROAD + width / 2)
            yield _standing((low + high) / 2, y, (high - low, width, 0.16), MATERIAL["pavement"])
        for x in (SIDE[0] - SIDE_WALK / 2, SIDE[1] + SIDE_WALK / 2):
            size = (SIDE_WALK, 90.0, 0.16)
            yield _standing(x, MIDDLE + side * (WALK + 45), size, MATERIAL["pavement"])


def _houses(rng: np.random.Generator) -> Solids:
    """House fronts along both streets, around the square and behind the car park."""
    left, right = MIDDLE + WALK, MIDDLE - WALK
    near, far = SIDE[0] - SIDE_WALK, SIDE[1] + SIDE_WALK
    yield from _row(rng, "x", (-96, near), left, 1)
    yield from _row(rng, "x", (-96, LOT[0]), right, -1)
    yield from _row(rng, "x", (LOT[1], near), right, -1)
    yield from _row(rng, "x", (far, 96), right, -1)
    yield from _row(rng, "x", (SQUARE[1], 96), left, 1)
    yield from _row(rng, "x", (SQUARE[0], SQUARE[1]), left + SQUARE_DEPTH, 1)
    yield from _row(rng, "x", LOT, right - 32, -1)
    for edge, away in ((near, -1), (far, 1)):
        yield from _row(rng, "y", (right - 80, right - 14), edge, away)
    yield from _row(rng, "y", (left + 14, left + 80), near, -1)
    yield from _row(rng, "y", (left + SQUARE_DEPTH + 8, left + 80), far, 1)


def _row(rng: np.random.Generator, axis: str, span: tuple[float, float], front: float, away: int) -> Solids:
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

    def part(ahead: float, left: float, low: float, size: tuple[float, float, float], surface: Surface) -> Box:
        center = (x + cos * ahead - sin * left, y + sin * ahead + cos * left)
        return Box((*center, GROUND + low + size[2] / 2), size, surface, yaw)

    body = part(0, 0, 0.22, (length, width, body_top - 0.22), paint)
    yield CarBody(body.center, body.size, body.surface, body.yaw, roof)
    glass = paint if van else MATERIAL["glass"]
    yield part(shift, 0, body_top, (length * cabin, width * 0.9, roof - body_top - 0.06), glass)
    yield part(shift, 0, roof - 0.06, (length * cabin * 0.86, width * 0.86, 0.06), paint)
    for ahead in (-0.3 * length, 0.3 * length):
        for left in (-0.45 * width, 0.45 * width):
            yield part(ahead, left, 0, (0.62, 0.2, 0.62), MATERIAL["tyre"])


def _parked_cars(rng: np.random.Generator) -> Solids:
    """Cars along the kerbs of both streets."""
    for side in (-1, 1):
        for x in np.arange(-81.0, 81.0, 6.2):
            # A gap beside the sensor: cars there would hide half of the street.
            if not -9 < x < SIDE[1] + 7 and rng.random() < 0.55:
                lane = MIDDLE + side * (ROAD - 1.1 + rng.normal(0, 0.08))
                turn = (0.0 if side < 0 else np.pi) + rng.normal(0, 0.03)
                yield from _car(rng, float(x + rng.uniform(-0.5, 0.5)), lane, turn)
        for y in np.arange(WALK + 7, 75.0, 6.4):
            for kerb, away in ((SIDE[0], 1), (SIDE[1], -1)):
                if rng.random() < 0.5:
                    lane = kerb + away * (1.1 + rng.normal(0, 0.08))
                    yield from _car(rng, lane, MIDDLE + side * float(y), -away * np.pi / 2)


def _traffic(rng: np.random.Generator) -> Solids:
    """Cars under way: in the own lane, oncoming, waiting in the side street, turning."""
    for x in (32.0, 55.0, -12.5, -37.0):
        yield from _car(rng, x, MIDDLE - 2.0, rng.normal(0, 0.02))
    for x in (16.0, -21.5, 41.0, 66.0):
        yield from _car(rng, x, MIDDLE + 2.0, np.pi + rng.normal(0, 0.02))
    for y in (WALK + 1.5, WALK + 8.0, WALK + 14.5):
        yield from _car(rng, 14.2, MIDDLE + y, -np.pi / 2 + rng.normal(0, 0.02))
    yield from _car(rng, 18.8, MIDDLE - WALK - 3, np.pi / 2)
    yield from _car(rng, 21.0, MIDDLE - 3.5, -np.pi / 3)  # turning


def _car_park(rng: np.random.Generator) -> Solids:
    """Two rows of cars, nose to nose, in a gap between the houses."""
    for row, yaw in ((14.0, np.pi / 2), (25.0, -np.pi / 2)):
        for x in np.arange(LOT[0] + 2, LOT[1] - 1, 2.7):
            if rng.random() < 0.6:
                y = MIDDLE - WALK - row + 8 + rng.normal(0, 0.15)
                yield from _car(rng, float(x), float(y), yaw + rng.normal(0, 0.03))


def _tree(rng: np.random.Generator, x: float, y: float) -> Solids:
    trunk, wide, high = rng.uniform(2.2, 3.4), rng.uniform(1.5, 2.8), rng.uniform(1.4, 2.4)
    center = (x, y, GROUND + trunk / 2)
    yield Cylinder(center, rng.uniform(0.1, 0.22), trunk, MATERIAL["trunk"])
    for _ in range(3):  # overlapping lobes give an uneven outline
        dx, dy, dz = rng.normal(0, 0.45, 3)
        lobe = (x + dx, y + dy, GROUND + trunk + 0.7 * high + dz)
        yield Ellipsoid(lobe, (wide * 0.8, wide * 0.8, high), MATERIAL["crown"])


def _avenue(rng: np.random.Generator) -> Solids:
    """Trees along the kerbs."""
    for side in (-1, 1):
        for x in np.arange(-84.0, 84.0, 11.0) + 4.0 * (side < 0):
            if not SIDE[0] - 6 < x < SIDE[1] + 6 and rng.random() < 0.8:
                spot = float(x + rng.normal(0, 0.7))
                yield from _tree(rng, spot, MIDDLE + side * (ROAD + 1.3))
        for y in np.arange(WALK + 10, 80.0, 13.0):
            for x in (SIDE[0] - 1.2, SIDE[1] + 1.2):
                if rng.random() < 0.6:
                    yield from _tree(rng, x, MIDDLE + side * float(y))


def _square(rng: np.random.Generator) -> Solids:
    """Grass behind hedges, with trees and a low wall scattered over it."""
    low, high = SQUARE
    edge = MIDDLE + WALK + 0.6
    for share in (0.22, 0.78):  # the gap in the middle is the entrance
        x = low + share * (high - low)
        yield _standing(x, edge, (0.36 * (high - low), 0.9, 0.9), MATERIAL["hedge"])
    for _ in range(18):
        x, y = rng.uniform(low + 3, high - 3), edge + rng.uniform(4, SQUARE_DEPTH - 4)
        yield from _tree(rng, float(x), float(y))
    for _ in range(5):
        x, y = rng.uniform(low + 4, high - 8), edge + rng.uniform(6, SQUARE_DEPTH - 8)
        size = (float(rng.uniform(2, 5)), float(rng.uniform(0.6, 3)), 0.6)
        yield _standing(float(x), float(y), size, MATERIAL["hedge"])


def _street_furniture(rng: np.random.Generator, side: int) -> Solids:
    """Lamp posts, sign posts and boxes along the kerb."""
    y = MIDDLE + side * (ROAD + 0.5)
    for x in np.arange(-80.0, 80.0, 18.0) + 6 * side:
        yield Cylinder((float(x), y, GROUND + 3.5), 0.09, 7.0, MATERIAL["pole"])
    for x in (*rng.uniform(-50, 50, 5), SIDE[0] - 1.2, SIDE[1] + 1.2):
        yield Cylinder((float(x), y + 0.4 * side, GROUND + 1.3), 0.04, 2.6, MATERIAL["pole"])
        yield _standing(float(x), y + 0.4 * side, (0.06, 0.62, 0.62), MATERIAL["sign"], 2.1)
    for x in rng.uniform(-60, 60, 4):
        size = (float(rng.uniform(0.5, 1.4)), 0.5, float(rng.uniform(0.8, 1.4)))
        yield _standing(float(x), MIDDLE + side * (WALK - 0.6), size, Surface(0.3))


def _people(rng: np.random.Generator) -> Solids:
    """Pedestrians on both pavements, on the zebra crossing and in the square."""
    spots: list[tuple[float, float]] = [(float(rng.uniform(-35, 50)), s * rng.uniform(8.4, 11.6)) for s in (-1, 1) * 12]
    spots += [(SIDE[0] - 3.2 + float(rng.normal(0, 0.5)), y) for y in (-2.9, 0.9, 4.4)]
    spots += [(rng.uniform(28, 50), WALK + rng.uniform(3, 25)) for _ in range(6)]
    for x, y in spots:
        size = rng.uniform(0.92, 1.08)
        for leg in (-0.11, 0.11):
            center = (x + leg, MIDDLE + y, GROUND + 0.42 * size)
            yield Cylinder(center, 0.08, 0.84 * size, MATERIAL["cloth"])
        torso = (x, MIDDLE + y, GROUND + 1.12 * size)
        yield Ellipsoid(torso, (0.25, 0.25, 0.38 * size), MATERIAL["cloth"])
        head = (x, MIDDLE + y, GROUND + 1.62 * size)
        yield Ellipsoid(head, (0.11, 0.11, 0.13), Surface(0.35))
