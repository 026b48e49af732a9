"""Ray casting of simple solids for a spinning lidar: the beams of one azimuth are an image column.

The sensor sits at the origin. A solid can only be seen in the azimuth window that its bounding
circle covers, so each solid is tested against a slice of the columns; a street of hundreds of
solids costs a fraction of a second.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
_TINY = np.float32(1e-9)


@dataclasses.dataclass(frozen=True)
class Surface:
    """How a solid answers the beam.

    `reflectivity` and `dropout` (share of beams without an echo) are in [0, 1]. A positive `depth`
    makes the solid porous, as foliage is: the beam enters and echoes after an exponentially
    distributed path of that mean, in metres. `windows` cuts a regular pattern of recessed, badly
    reflecting panes into the upright faces of a box.
    """

    reflectivity: float
    dropout: float = 0.02
    depth: float = 0.0
    windows: bool = False


@dataclasses.dataclass(frozen=True)
class Box:
    """An upright cuboid: `center` and `size` in metres, `yaw` turns it about z (radians)."""

    center: tuple[float, float, float]
    size: tuple[float, float, float]
    surface: Surface
    yaw: float = 0.0

    @property
    def radius(self) -> float:
        """Radius of the bounding circle seen from above, metres."""
        return float(np.hypot(self.size[0], self.size[1]) / 2)

    def intersect(self, dirs: Array) -> tuple[Array, Array, Array, Array]:
        """Where the rays meet the solid.

        Args:
            dirs: [3, beams, columns] float32, unit vectors.

        Returns:
            Entry distance (infinite for a miss) and exit distance in metres, cosine of incidence,
            and 1 where a window pane was hit; each [beams, columns].
        """
        cos, sin = np.float32(np.cos(self.yaw)), np.float32(np.sin(self.yaw))
        turned = np.stack([cos * dirs[0] + sin * dirs[1], -sin * dirs[0] + cos * dirs[1], dirs[2]])
        turned = np.where(np.abs(turned) < _TINY, _TINY, turned)
        cx, cy, cz = self.center
        origin = np.array([-(cos * cx + sin * cy), sin * cx - cos * cy, -cz], np.float32)
        half = np.asarray(self.size, np.float32) / 2
        slow = (-half - origin)[:, None, None] / turned
        fast = (half - origin)[:, None, None] / turned
        near, far = np.minimum(slow, fast), np.maximum(slow, fast)
        enter, leave = near.max(0), far.min(0)
        axis = near.argmax(0)
        cosine = np.abs(np.take_along_axis(turned, axis[None], 0)[0])
        miss = (leave < enter) | (enter <= 0)
        enter = np.where(miss, np.float32(np.inf), enter)
        if not self.surface.windows:
            return enter, leave, cosine, np.zeros_like(enter)
        with np.errstate(invalid="ignore"):
            hit = turned * enter + origin[:, None, None]
            along = np.where(axis == 0, hit[1], hit[0]) + np.float32(100.0)
            pane = (axis < 2) & (np.abs(along % 2.8 - 1.4) < 0.65)
            pane &= np.abs((hit[2] + half[2]) % 3.1 - 1.9) < 0.75
        # Panes lie behind the wall: the recess lengthens the path.
        enter = np.where(pane, enter + np.float32(0.22) / np.maximum(cosine, 0.2), enter)
        return enter, leave, cosine, pane.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Cylinder:
    """An upright cylinder without caps: poles, trunks, legs."""

    center: tuple[float, float, float]
    radius: float
    height: float
    surface: Surface

    def intersect(self, dirs: Array) -> tuple[Array, Array, Array, Array]:
        """See `Box.intersect`."""
        cx, cy, cz = self.center
        flat = np.maximum(dirs[0] ** 2 + dirs[1] ** 2, _TINY)
        middle = (dirs[0] * cx + dirs[1] * cy) / flat
        offset = np.abs(dirs[0] * cy - dirs[1] * cx) / np.sqrt(flat)
        inside = np.maximum(self.radius**2 - offset**2, 0)
        chord = np.sqrt(inside / flat)
        enter = middle - chord
        z = enter * dirs[2]
        hit = (offset < self.radius) & (enter > 0) & (np.abs(z - cz) < self.height / 2)
        cosine = np.sqrt(inside) / self.radius
        return np.where(hit, enter, np.inf), enter + 2 * chord, cosine, np.zeros_like(enter)


@dataclasses.dataclass(frozen=True)
class Ellipsoid:
    """An axis-aligned ellipsoid with half axes `size` (x, y, z in metres): crowns, torsos."""

    center: tuple[float, float, float]
    size: tuple[float, float, float]
    surface: Surface

    @property
    def radius(self) -> float:
        """Radius of the bounding circle seen from above, metres."""
        return max(self.size[0], self.size[1])

    def intersect(self, dirs: Array) -> tuple[Array, Array, Array, Array]:
        """See `Box.intersect`."""
        half = np.asarray(self.size, np.float32)
        center = np.asarray(self.center, np.float32) / half
        scaled = dirs / half[:, None, None]
        a = (scaled**2).sum(0)
        b = np.tensordot(center, scaled, 1)
        inside = b**2 - a * ((center**2).sum() - 1)
        root = np.sqrt(np.maximum(inside, 0))
        enter = (b - root) / a
        hit = (inside > 0) & (enter > 0)
        cosine = np.clip(root / np.sqrt(a), 0, 1)
        return np.where(hit, enter, np.inf), (b + root) / a, cosine, np.zeros_like(enter)


class RayImage:
    """Nearest echo per ray: `t` (metres), `reflectivity`, `dropout` and `cosine` of incidence.

    Each is float32 [beams, columns]. `category` is int8 and says what was hit, in the caller's numbers.

    Args:
        elevation: [beams], radians above the horizon.
        columns: azimuth steps of one turn.
        rng: draws the path inside porous solids.
    """

    def __init__(self, elevation: npt.NDArray[np.float64], columns: int, rng: np.random.Generator):
        azimuth = (np.arange(columns) + 0.5) * (2 * np.pi / columns) - np.pi
        up, across = np.sin(elevation)[:, None], np.cos(elevation)[:, None]
        shape = (len(elevation), columns)
        self.dirs: Array = np.stack(
            [across * np.cos(azimuth), across * np.sin(azimuth), np.broadcast_to(up, shape)]
        ).astype(np.float32)
        self.t: Array = np.full(shape, np.inf, np.float32)
        self.reflectivity: Array = np.zeros(shape, np.float32)
        self.dropout: Array = np.zeros(shape, np.float32)
        self.cosine: Array = np.ones(shape, np.float32)
        self.category: npt.NDArray[np.int8] = np.zeros(shape, np.int8)
        self._columns = columns
        self._rng = rng

    def _window(self, x: float, y: float, radius: float) -> npt.NDArray[np.int64]:
        """Columns in which a circle of `radius` around (x, y) can be hit."""
        distance = float(np.hypot(x, y))
        if distance <= radius * 1.001:
            return np.arange(self._columns)
        middle, half = np.arctan2(y, x), np.arcsin(radius / distance)
        step = 2 * np.pi / self._columns
        low = int(np.floor((middle - half + np.pi) / step)) - 1
        high = int(np.ceil((middle + half + np.pi) / step)) + 1
        return np.arange(low, min(high, low + self._columns)) % self._columns

    def add(self, solid: Box | Cylinder | Ellipsoid, category: int = 0) -> None:
        """Keep the echoes of `solid` that are nearer than what was there, marked as `category`."""
        columns = self._window(solid.center[0], solid.center[1], solid.radius)
        enter, leave, cosine, pane = solid.intersect(self.dirs[:, :, columns])
        surface = solid.surface
        if surface.depth:
            inside = self._rng.exponential(surface.depth, enter.shape).astype(np.float32)
            enter = np.where(enter + inside < leave, enter + inside, np.inf)
            cosine = np.full_like(cosine, 0.7)
        before = self.t[:, columns]
        new = enter < before
        self.t[:, columns] = np.where(new, enter, before)
        reflectivity = surface.reflectivity * (1 - 0.75 * pane)
        dropout = surface.dropout + 0.45 * pane
        self._merge(self.reflectivity, columns, new, reflectivity)
        self._merge(self.dropout, columns, new, dropout)
        self._merge(self.cosine, columns, new, cosine)
        self.category[:, columns] = np.where(new, np.int8(category), self.category[:, columns])

    @staticmethod
    def _merge(
        image: Array, columns: npt.NDArray[np.int64], new: npt.NDArray[np.bool_], value: npt.NDArray[np.floating]
    ) -> None:
        image[:, columns] = np.where(new, value, image[:, columns])
