"""Everything that can be configured from outside, validated in one place.

| environment variable | values | meaning |
|---|---|---|
| `SPARSE_BRIDGE_DATAFLOW` | auto, masked, unmasked, per_offset, explicit | force one dataflow |
| `SPARSE_BRIDGE_FP32` | auto, ieee | fp32 products that may not be rounded to TF32: on NVIDIA's data-centre GPUs (A100, H100, B200 and relatives) as three TF32 products, whose sum is as exact as fp32, or always by IEEE multiply-adds, several times slower there |
| `SPARSE_BRIDGE_SELF_CHECK` | 0, 1 | compare a GPU's kernels with the CPU at their first use (default 1) |
| `SPARSE_BRIDGE_AHEAD` | 0, 1 | on a GPU, build all maps that the last scenes of a grid were asked for at the first question, and compile side by side at first use (default 1) |
| `SPARSE_BRIDGE_MAP_GRAPHS` | 0, 1 | on an NVIDIA GPU, replay the maps built ahead from captured graphs, for scenes of up to 131,072 voxels; the graphs of a device hold up to 1/64 of its memory (default 1) |
| `SPARSE_BRIDGE_TUNE` | cached, off, full, pinned | how tiles of GPU kernels are chosen: from stored and shipped winners, by rule alone, tuned when new (costs time, may change bits between steps), or from `TUNE_FILE` / shipped winners alone (same bits in every process) |
| `SPARSE_BRIDGE_TUNE_FILE` | a path | the winners of `TUNE=pinned`, made by `python -m sparse_bridge warm --tune --export`; default: the shipped ones |
| `SPARSE_BRIDGE_CACHE_DIR` | a path | where winners are stored; default: the platform's cache folder |
| `SPARSE_BRIDGE_MODE` | auto, patch, standin | default `mode` of `enable()` |
| `SPARSE_BRIDGE_STRICT` | 0, 1 | raise instead of running the original framework |
| `SPARSE_BRIDGE_GROUPS` | 0, 1 | accept `groups > 1` in spconv layers (spconv itself refuses) |
| `SPARSE_BRIDGE_SHARED_KEYS` | 0, 1 | spconv 1.x rule: one `indice_key` may serve kernels of other shapes |
| `SPARSE_BRIDGE_TORCHSPARSE_PROFILE` | auto, 2.1, 2.0, 1.4 | release whose layouts and signatures torchsparse has |
| `SPARSE_BRIDGE_TORCHSPARSE_KEEP_TAIL` | 0, 1 | torchsparse 2.1: strided layers keep the cells that its own rule drops |
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .errors import SettingError

FP32_MODES = ("auto", "ieee")
DATAFLOWS = ("auto", "masked", "unmasked", "per_offset", "explicit")
TUNE_MODES = ("cached", "off", "full", "pinned")
MODES = ("auto", "patch", "standin")
TORCHSPARSE_PROFILES = ("auto", "2.1", "2.0", "1.4")


@dataclasses.dataclass(frozen=True)
class Settings:
    dataflow: str = "auto"
    fp32: str = "auto"
    self_check: bool = True
    ahead: bool = True
    map_graphs: bool = True
    tune: str = "cached"
    tune_file: str = ""
    cache_dir: str = ""
    mode: str = "auto"
    strict: bool = False
    groups: bool = False
    shared_keys: bool = False
    torchsparse_profile: str = "auto"
    torchsparse_keep_tail: bool = False


_CHOICES = {
    "dataflow": DATAFLOWS,
    "fp32": FP32_MODES,
    "tune": TUNE_MODES,
    "mode": MODES,
    "torchsparse_profile": TORCHSPARSE_PROFILES,
}
_PATHS = ("tune_file", "cache_dir")
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


def _check(name: str, value: object, shown: str) -> object:
    if name in _CHOICES:
        allowed: tuple[str, ...] = _CHOICES[name]
        if value not in allowed:
            raise SettingError(f"{shown} is {value!r}; expected one of {', '.join(allowed)}.")
        return value
    if name in _PATHS:
        if not isinstance(value, (str, os.PathLike)):
            raise SettingError(f"{shown} is {value!r}; expected a path.")
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise SettingError(f"{shown} is {value!r}; expected 0 or 1.")


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the `SPARSE_BRIDGE_*` variables of `environ`; `SettingError` names a bad value and the
    allowed ones."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(Settings):
        variable = "SPARSE_BRIDGE_" + field.name.upper()
        if variable in environ:
            found[field.name] = _check(field.name, environ[variable], variable)
    return Settings(**found)  # type: ignore[arg-type]


_lock = threading.RLock()
_current: Settings | None = None


def get() -> Settings:
    """The settings in force; the environment is read once, at first use."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = from_environment(os.environ)
    return _current


def update(**changes: object) -> Settings:
    """Change settings for the process; returns the ones in force before."""
    global _current
    with _lock:
        before = get()
        names = {field.name for field in dataclasses.fields(Settings)}
        for name in changes:
            if name not in names:
                raise SettingError(
                    f"unknown setting {name!r}; expected one of {', '.join(sorted(names))}."
                )
        checked = {name: _check(name, value, name) for name, value in changes.items()}
        _current = dataclasses.replace(before, **checked)  # type: ignore[arg-type]
    return before


@contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """`update` for the length of a `with` block (process-wide, like `update`)."""
    global _current
    before = update(**changes)
    try:
        yield get()
    finally:
        with _lock:
            _current = before
