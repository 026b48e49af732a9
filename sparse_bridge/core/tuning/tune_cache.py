"""Winners of tuning on disk: versioned, atomic, locked, and shipped with the package.

One JSON file per device and version, `<device>-<stamp>.json`, where the stamp hashes the format,
the tuned kernels, Triton's version and the number of compute units: an edited kernel or a new
Triton starts a file of its own. A file is replaced whole (written beside, then `os.replace`), under
a lock that is waited for only so long; readers need none. What cannot be read is moved aside, with
one warning, and never stops a layer.

A file also holds the winners of groups of layers, which name the kernels that they were timed with.

Shipped winners (`kernels/tiles/tuned/<device>.json` or `<arch>.json`) have the same schema. They
serve other Triton versions too: a winner only says which of several right answers is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock
import torch

from ... import log
from ...errors import SettingError
from ...kernels.runtime import target as targets
from .groups import Groups, GroupWinner, decode_groups
from .kernel_hash import kernel_hash

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from ...kernels.tiles.tile import TileConfig

FORMAT = 2
DIRECTIONS = ("fwd", "dgrad", "wgrad")  # a namespace each
WRITE_WAIT = 2.0  # seconds for the lock of the file; a winner not stored is tuned again some day
_SIZES = ("block_m", "block_n", "block_k", "num_warps")


class CacheFileError(Exception):
    """A file of winners that cannot be used, and why."""


@dataclasses.dataclass(frozen=True)
class Winner:
    """The fastest tile of one bucket, its time and the default tile's, and how many were timed."""

    tile: TileConfig
    microseconds: float
    default_microseconds: float
    tested: int


Winners = dict[str, dict[str, Winner]]  # direction -> bucket -> winner


class Contents(NamedTuple):
    """What a file of winners holds: of single problems, and of groups of layers."""

    winners: Winners
    groups: Groups


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What a file of winners is valid for.

    kernels: hash of the tuned kernels.  compute_units: SMs / CUs; a partition of a GPU has fewer.
    """

    kernels: str
    triton: str
    device: str
    arch: str
    compute_units: int
    format: int = FORMAT

    @staticmethod
    def of(device: torch.device, target: targets.Target) -> Stamp:
        """The stamp of this process for tensors of `device`."""
        version = ".".join(map(str, targets.triton_version() or ()))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else target.arch
        return Stamp(kernel_hash(), version, name, target.arch, target.compute_units)

    @property
    def slug(self) -> str:
        """The device's name as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-") or "device"

    @property
    def file_name(self) -> str:
        """Of the file of winners: the device's name and a hash of the whole stamp."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{self.slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def encode(stamp: Stamp, winners: Winners, groups: Groups | None = None) -> str:
    """The text of a file of winners; equal winners give equal texts."""
    content = {
        direction: {bucket: _encode_winner(winner) for bucket, winner in sorted(buckets.items())}
        for direction, buckets in sorted(winners.items())
    }
    fields = {**dataclasses.asdict(stamp), "winners": content}
    if groups:
        fields["groups"] = {key: dataclasses.asdict(winner) for key, winner in sorted(groups.items())}
    return json.dumps(fields, indent=1) + "\n"


def _encode_winner(winner: Winner) -> dict[str, Any]:
    tile = dataclasses.asdict(winner.tile) | {"vendor": dict(winner.tile.vendor)}
    return {
        "tile": tile,
        "us": round(winner.microseconds, 2),
        "default_us": round(winner.default_microseconds, 2),
        "tested": winner.tested,
    }


def decode(text: str) -> tuple[Stamp, Winners, Groups]:
    """(stamp, winners, groups) of `encode`'s text.

    Raises: CacheFileError that says what is wrong with it.
    """
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise CacheFileError(f"format {raw['format']!r}, expected {FORMAT}")
        fields = {field.name: raw[field.name] for field in dataclasses.fields(Stamp)}
        stamp = Stamp(**fields)
        if not isinstance(stamp.device, str) or not isinstance(stamp.compute_units, int):
            raise CacheFileError("its header names no device")
        winners: Winners = {direction: {} for direction in DIRECTIONS}
        for direction, buckets in raw["winners"].items():
            for bucket, value in buckets.items():
                winners[direction][bucket] = _decode_winner(value)
        groups = decode_groups(raw.get("groups", {}))
    except CacheFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheFileError(f"{type(error).__name__}: {error}") from None
    return stamp, winners, groups


def _decode_winner(raw: dict[str, Any]) -> Winner:
    from ...kernels.tiles.tile import TileConfig

    tile, names = raw["tile"], {field.name for field in dataclasses.fields(TileConfig)}
    sizes = [tile[name] for name in _SIZES]
    vendor = tuple(sorted((str(k), int(v)) for k, v in tile["vendor"].items()))
    if set(tile) != names or not all(type(v) is int for k, v in tile.items() if k != "vendor"):
        raise CacheFileError(f"a tile of {tile}")
    if any(not 1 <= size <= 1 << 12 or size & (size - 1) for size in sizes) or min(sizes[:3]) < 16:
        raise CacheFileError(f"a tile of {sizes}; expected powers of two")
    times = float(raw["us"]), float(raw["default_us"])
    return Winner(TileConfig(**{**tile, "vendor": vendor}), *times, int(raw["tested"]))


def shipped_folder() -> Traversable:
    """Where the package keeps its winners."""
    return resources.files("sparse_bridge.kernels.tiles").joinpath("tuned")


def shipped(stamp: Stamp) -> list[Contents]:
    """The package's winners for a device: those of its name, then those of its architecture."""
    files = []
    for name in dict.fromkeys((stamp.slug, stamp.arch)):
        path = shipped_folder().joinpath(f"{name}.json")
        if not path.is_file():
            continue
        try:
            files.append(Contents(*decode(path.read_text(encoding="utf-8"))[1:]))
        except CacheFileError as error:
            log.once(("shipped", name), f"shipped tuned tiles {name}.json: {error}.", level=30)
    return files


def pinned(path: str) -> list[Contents]:
    """The winners of a file that the user named.

    Raises: SettingError when there is no such file or it cannot be read.
    """
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
        return [Contents(*decode(text)[1:])]
    except (OSError, UnicodeDecodeError, CacheFileError) as error:
        raise SettingError(
            f"SPARSE_BRIDGE_TUNE=pinned:FILE, FILE is {path!r}; expected a file made by "
            f"`python -m sparse_bridge warm --tune --export FILE`: {error}"
        ) from None


class TuneCache:
    """The file of one stamp in one folder. Every failure of the disk means "nothing stored"."""

    def __init__(self, folder: pathlib.Path, stamp: Stamp) -> None:
        self.folder, self.stamp = folder, stamp
        self.path = folder / stamp.file_name

    def load(self) -> Winners:
        """The winners stored so far, but for groups; see `contents`."""
        return self.contents().winners

    def contents(self) -> Contents:
        """All that is stored so far. A file that is no good is moved aside."""
        try:
            return self._read()
        except CacheFileError:
            with self._locked(self.path.name, WRITE_WAIT) as mine:
                return self._read_or_move() if mine else Contents({}, {})

    def store(self, direction: str, bucket: str, winner: Winner) -> bool:
        """Add a winner to what other processes have stored meanwhile; False if that failed."""

        def add(contents: Contents) -> None:
            contents.winners.setdefault(direction, {})[bucket] = winner

        return self._change(add)

    def store_group(self, winner: GroupWinner) -> bool:
        """`store` of a group's winner."""

        def add(contents: Contents) -> None:
            contents.groups[winner.key] = winner

        return self._change(add)

    def _change(self, add: Callable[[Contents], None]) -> bool:
        with self._locked(self.path.name, WRITE_WAIT) as mine:
            if not mine:
                return False
            contents = self._read_or_move()
            add(contents)
            try:
                self._replace(encode(self.stamp, *contents))
            except OSError as error:
                self._warn("write", error)
                return False
        return True

    @contextlib.contextmanager
    def claim(self, direction: str, bucket: str, wait: float) -> Iterator[bool]:
        """Whether this process alone tunes the bucket; waits at most `wait` seconds for another."""
        text = f"{self.path.name}/{direction}/{bucket}"
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._locked(name, wait) as mine:
            yield mine

    @contextlib.contextmanager
    def _locked(self, name: str, wait: float) -> Iterator[bool]:
        lock = filelock.FileLock(self.folder / "locks" / f"{name}.lock")
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=wait, poll_interval=0.01)
        except filelock.Timeout:
            yield False
            return
        except (OSError, NotImplementedError) as error:
            self._warn("lock", error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _read(self) -> Contents:
        try:
            stamp, winners, groups = decode(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Contents({}, {})
        except UnicodeDecodeError as error:
            raise CacheFileError(str(error)) from None
        except OSError as error:
            self._warn("read", error)
            return Contents({}, {})
        if stamp != self.stamp:
            raise CacheFileError("it was made for another device or version")
        return Contents(winners, groups)

    def _read_or_move(self) -> Contents:
        """Under the lock, so that nobody's new file is moved instead of the bad one."""
        try:
            return self._read()
        except CacheFileError as error:
            aside = self.path.with_name(self.path.name + ".aside")
            with contextlib.suppress(OSError):
                os.replace(self.path, aside)
            log.once(
                ("tune-cache", str(self.path)),
                f"{self.path} holds no usable tuned tiles ({error}); moved to {aside.name}.",
                level=30,
            )
            return Contents({}, {})

    def _replace(self, text: str) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")  # one writer at a time
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _warn(self, action: str, error: BaseException) -> None:
        log.once(
            ("tune-cache", action, str(self.folder)),
            f"cannot {action} tuning results in {self.folder}: {error}. They last for this process.",
            level=30,
        )
