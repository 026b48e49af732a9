"""Everything that can be configured from outside, validated in one place.

| environment variable | values (default first) | meaning |
|---|---|---|
| `SPARSE_BRIDGE_DATAFLOW` | auto, masked, masked:2, masked:3, masked:4, unmasked, grouped, per_offset, explicit | force one dataflow; a number: mask splits |
| `SPARSE_BRIDGE_FP32` | auto, ieee | fp32 products that may not be rounded to TF32: on NVIDIA's data-centre GPUs (A100, H100, B200 and relatives) as three TF32 products, whose sum is as exact as fp32, or always by IEEE multiply-adds, several times slower there |
| `SPARSE_BRIDGE_OPTIMIZE` | auto, graphs, inference, fuse, off | what is done to models as they run. fuse: in inference, norms, activations and residual sums join the convolutions before them. auto: on NVIDIA GPUs, parts that take and return sparse tensors are also replayed from captured graphs, in inference and in training. graphs: the same, with a warning about what is not replayed. inference: calls without gradients alone. off: nothing. auto:N, graphs:N, inference:N: one replay of N is compared with the layers (keyword compare_every; without: 256; 0: none) |
| `SPARSE_BRIDGE_CAPTURE` | prefetch, off, always | on a GPU, how maps that a program asks for again and again are prepared: queued together at the first request, or built one by one; `always` queues them, too, and replays models from graphs on ROCm, whose replayed graphs have given wrong data |
| `SPARSE_BRIDGE_STARTUP` | a list of `warmup=1`, `self_check=1`, `native=1` | at the first use of a GPU, compile what a program is about to need in parallel, and import Triton early; compare its kernels with the CPU; compile the helper in C that repeats calls of layers |
| `SPARSE_BRIDGE_TUNE` | cached, off, full, pinned, pinned:FILE | how tiles of GPU kernels are chosen: from stored and shipped tuned tiles, by rule alone, tuned when new (costs time, may change bits between steps), or from FILE or the shipped ones alone (same bits in every process) |
| `SPARSE_BRIDGE_CACHE_DIR` | a path | where tuned tiles and the compiled helper are stored; default: the platform's cache folder |
| `SPARSE_BRIDGE_ENABLE` | a list of `mode=auto`, `strict=0`, `torchsparse_profile=auto`, `minkowski_profile=auto` | arguments that `enable()` takes where the program names none |
| `SPARSE_BRIDGE_RULES` | a list of `groups`, `shared_keys`, `torchsparse_keep_tail` | rules of the frameworks that are relaxed |

Each is a keyword, or several, of `update` (`KEYWORDS`). A list is separated by commas; its items are
`keyword=value`, or `keyword` alone for 1. Names and values of earlier releases (`RENAMED`,
`RENAMED_VALUES`) are accepted for one release, with a `FutureWarning`. An empty variable is none.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import log
from .errors import SettingError
from .names import meant

PREFIX = "SPARSE_BRIDGE_"


class DataflowTraits(NamedTuple):
    """What code below the convolutions asks of a dataflow.

    kernels: Triton kernels compute it.  tiles: it follows the tiles that a map keeps, so that these
    are worth having before a layer asks for them.
    """

    kernels: bool
    tiles: bool = False


# `core.conv.dataflows` has a file for each.
DATAFLOWS = {
    "masked": DataflowTraits(True, tiles=True),
    "masked:2": DataflowTraits(True),
    "masked:3": DataflowTraits(True),
    "masked:4": DataflowTraits(True),
    "unmasked": DataflowTraits(True),
    "grouped": DataflowTraits(True),
    "per_offset": DataflowTraits(False),
    "explicit": DataflowTraits(False),
}
TILED = {"auto", *(name for name, traits in DATAFLOWS.items() if traits.tiles)}
CHOICES = {
    "dataflow": ("auto", *DATAFLOWS),
    "fp32": ("auto", "ieee"),
    "capture": ("prefetch", "off", "always"),
    "tune": ("cached", "off", "full", "pinned"),
    "optimize": ("auto", "graphs", "inference", "fuse", "off"),
    "mode": ("auto", "patch", "standin"),
    "torchsparse_profile": ("auto", "2.1", "2.0", "1.4"),
    "minkowski_profile": ("auto", "0.5", "0.4"),
}
MODES = CHOICES["mode"]
REPLAYING = ("auto", "graphs", "inference")  # of `optimize`: those with replays, some of which are compared


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in force; the module's table says what each means."""

    dataflow: str = "auto"
    fp32: str = "auto"
    optimize: str = "auto"
    compare_every: int = 256
    capture: str = "prefetch"
    warmup: bool = True
    self_check: bool = True
    native: bool = True
    tune: str = "cached"
    tune_file: str = ""
    cache_dir: str = ""
    mode: str = "auto"
    strict: bool = False
    torchsparse_profile: str = "auto"
    minkowski_profile: str = "auto"
    groups: bool = False
    shared_keys: bool = False
    torchsparse_keep_tail: bool = False


FIELDS = tuple(field.name for field in dataclasses.fields(Settings))
# What each variable sets, by its name without the prefix. Several keywords: a list.
KEYWORDS = {
    "DATAFLOW": ("dataflow",),
    "FP32": ("fp32",),
    "OPTIMIZE": ("optimize", "compare_every"),
    "CAPTURE": ("capture",),
    "STARTUP": ("warmup", "self_check", "native"),
    "TUNE": ("tune", "tune_file"),
    "CACHE_DIR": ("cache_dir",),
    "ENABLE": ("mode", "strict", "torchsparse_profile", "minkowski_profile"),
    "RULES": ("groups", "shared_keys", "torchsparse_keep_tail"),
}
# Names of earlier releases: what to write today.
RENAMED = {
    "AHEAD": "SPARSE_BRIDGE_CAPTURE=off and SPARSE_BRIDGE_STARTUP=warmup=0",
    "MAP_GRAPHS": "SPARSE_BRIDGE_CAPTURE=prefetch",
    "WARMUP": "SPARSE_BRIDGE_STARTUP=warmup=...",
    "SELF_CHECK": "SPARSE_BRIDGE_STARTUP=self_check=...",
    "TUNE_FILE": "SPARSE_BRIDGE_TUNE=pinned:FILE",
    "MODE": "SPARSE_BRIDGE_ENABLE=mode=...",
    "STRICT": "SPARSE_BRIDGE_ENABLE=strict",
    "TORCHSPARSE_PROFILE": "SPARSE_BRIDGE_ENABLE=torchsparse_profile=...",
    "GROUPS": "SPARSE_BRIDGE_RULES=groups",
    "SHARED_KEYS": "SPARSE_BRIDGE_RULES=shared_keys",
    "TORCHSPARSE_KEEP_TAIL": "SPARSE_BRIDGE_RULES=torchsparse_keep_tail",
}
# Values of earlier releases: what they are called today.
RENAMED_VALUES = {"capture": {"graphs": "prefetch"}}
# What two switches of earlier releases meant when they were off.
_SWITCHES: dict[str, dict[str, Any]] = {
    "ahead": {"capture": "off", "warmup": False},
    "map_graphs": {"capture": "prefetch"},
}
_PATHS = ("tune_file", "cache_dir")
_NUMBERS = ("compare_every",)
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


def _check(name: str, value: object, label: str) -> object:
    if name in CHOICES:
        if isinstance(value, str) and value in (today := RENAMED_VALUES.get(name, {})):
            _warn(f"{label}={value}", f"{label}={today[value]}")
            value = today[value]
        if value not in CHOICES[name]:
            hint = meant(str(value), CHOICES[name])
            raise SettingError(f"{label} is {value!r}; expected one of {', '.join(CHOICES[name])}.{hint}")
        return value
    if name in _PATHS:
        if not isinstance(value, (str, os.PathLike)):
            raise SettingError(f"{label} is {value!r}; expected a path.")
        return os.fspath(value)
    if name in _NUMBERS:
        if isinstance(value, bool) or not str(value).isdecimal():
            raise SettingError(f"{label} is {value!r}; expected a number, 0 or more.")
        return int(str(value))
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise SettingError(f"{label} is {value!r}; expected 0 or 1.")


def _warn(old: str, new: str) -> None:
    text = f"{old} is called {new} now; the next release does not accept it."
    log.warn(text, FutureWarning)


def _checked(name: str, value: object, label: str) -> dict[str, Any]:
    """The setting `name` and its value; what a name of earlier releases stands for."""
    if name not in _SWITCHES:
        return {name: _check(name, value, label)}
    return {} if _check(name, value, label) else _SWITCHES[name]


def _listed(variable: str, text: str) -> dict[str, Any]:
    """Keywords and values of a list such as "mode=patch,strict"."""
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = item.partition("=")
        if name not in KEYWORDS[variable]:
            expected = f"expected a list of {', '.join(KEYWORDS[variable])}.{meant(name, KEYWORDS[variable])}"
            raise SettingError(f"{PREFIX}{variable} names {name!r}; {expected}")
        values[name] = _check(name, value if separator else "1", f"{name} in {PREFIX}{variable}")
    return values


def _optimize(text: str, label: str) -> dict[str, Any]:
    """Keywords and values of a mode such as "auto", or with a number "auto:64"."""
    mode, separator, number = text.partition(":")
    values = {"optimize": _check("optimize", mode, label)}
    if not separator:
        return values
    if mode not in REPLAYING:
        why = f"{mode} replays nothing, so no replay is compared; leave the number out"
        raise SettingError(f"{label} is {text!r}, but {why}.")
    if not number.isdecimal():
        raise SettingError(f"{label} is {text!r}; expected a number behind the colon, 0 or more.")
    return {**values, "compare_every": int(number)}


def _parsed(variable: str, text: str) -> dict[str, Any]:
    """Keywords and values that one variable of today sets."""
    first, *more = KEYWORDS[variable]
    if variable == "TUNE":
        mode, separator, file = text.partition(":")
        if separator and mode == "pinned":
            if not file:
                raise SettingError(
                    f"{PREFIX}{variable} is {text!r}; expected a file behind the colon, or pinned alone."
                )
            return {"tune": mode, "tune_file": file}
    elif variable == "OPTIMIZE":
        return _optimize(text, PREFIX + variable)
    elif more:
        return _listed(variable, text)
    return {first: _check(first, text, PREFIX + variable)}


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the `SPARSE_BRIDGE_*` variables of `environ`. Today's names go before renamed ones. Empty: not set.

    Raises:
        SettingError: names a bad value and the allowed ones.
    """
    values: dict[str, Any] = {}
    # MAP_GRAPHS before AHEAD: where both are off, nothing is prefetched.
    for old in sorted(RENAMED, reverse=True):
        if environ.get(PREFIX + old):
            _warn(PREFIX + old, RENAMED[old])
            values |= _checked(old.lower(), environ[PREFIX + old], PREFIX + old)
    for variable in KEYWORDS:
        if environ.get(PREFIX + variable):
            values |= _parsed(variable, environ[PREFIX + variable])
    return Settings(**values)


# Variables with the prefix that are no settings: what `run` hands on, and what this project's tests read.
_NO_SETTING = ("INHERITED", "TEST_")
_TOGETHER = PREFIX.replace("_", "", 1)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of `environ` with the prefix, however it is written, that nothing reads, and what each says of it, in
    a sentence."""
    unknown = {}
    for name in sorted(environ):
        prefix = next((prefix for prefix in (PREFIX, _TOGETHER) if name.upper().startswith(prefix)), None)
        if prefix is None:
            continue
        variable = name[len(prefix) :]
        known = variable in (*KEYWORDS, *RENAMED) or variable.startswith(_NO_SETTING)
        if not (known and name.startswith(PREFIX)):
            hint = meant(variable, KEYWORDS, PREFIX)
            unknown[name] = f"{name} is set, but sparse_bridge has no such setting.{hint}"
    return unknown


_told: set[str] = set()


def warn_of_unknown_variables() -> None:
    """Say once in a process which variables nothing reads."""
    for name, text in unknown_variables(os.environ).items():
        if name not in _told:
            _told.add(name)
            log.warn(text, UserWarning)


_lock = threading.RLock()
_current: Settings | None = None
generation = 0  # what was decided at another count is to be decided again
_counted = itertools.count(1)
_besides: Hashable = None  # what else decisions depend on, see `turn_to`
_generations: dict[Hashable, int] = {None: 0}  # by that, since the settings last changed


def changed() -> None:
    """Say that decisions may not hold any longer; settings say so by themselves."""
    global generation
    with _lock:
        generation = next(_counted)
        _generations.clear()
        _generations[_besides] = generation


def turn_to(besides: Hashable) -> None:
    """Say what decisions depend on besides the settings: those made when it was the same hold
    again."""
    global generation, _besides
    with _lock:
        _besides = besides
        if besides not in _generations:
            _generations[besides] = next(_counted)
        generation = _generations[besides]


def get() -> Settings:
    """The settings in force; the environment is read once, at first use."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = from_environment(os.environ)
    return _current


def reset(to: Settings | None = None) -> None:
    """Put `to` in force, or what the environment says at the next use."""
    global _current
    with _lock:
        _current = to
        changed()


def update(**changes: object) -> Settings:
    """Change settings for the process; returns the ones in force before.

    Raises:
        SettingError: an unknown setting, or a bad value.
    """
    with _lock:
        previous = get()
        checked: dict[str, Any] = {}
        for name, value in changes.items():
            if name in _SWITCHES:
                _warn(name, " and ".join(_SWITCHES[name]))
            elif name not in FIELDS:
                raise SettingError(
                    f"unknown setting {name!r}; expected one of {', '.join(sorted(FIELDS))}.{meant(name, FIELDS)}"
                )
            checked |= _checked(name, value, name)
        reset(dataclasses.replace(previous, **checked))
    return previous


@contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """`update_settings` for the length of a `with` block: process-wide, too."""
    previous = update(**changes)
    try:
        yield get()
    finally:
        reset(previous)
