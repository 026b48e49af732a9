"""The releases of Python, torch and Triton that the package is tested with: the one list that
`enable()`, `doctor`, SUPPORT.md and noxfile.py go by."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from . import log, state

# Oldest and newest Python.
PYTHONS = ("3.10", "3.13")
# The oldest and the newest Triton that each torch was tested with; torch releases between two of
# these go with Tritons between theirs.
TRITONS: dict[str, tuple[str, str]] = {
    "2.4": ("3.0", "3.0"),
    "2.6": ("3.2", "3.2"),
    "2.8": ("3.4", "3.4"),
    "2.10": ("3.6", "3.6"),
    "2.11": ("3.6", "3.6"),
    "2.13": ("3.6", "3.9"),
    "2.14": ("3.8", "3.8"),
    "2.15": ("3.9", "3.9"),
}
Release = tuple[int, ...]
_warned = False


@state.owns
def reset() -> None:
    """Warn again."""
    global _warned
    _warned = False


def release(text: str) -> Release:
    """Major and minor of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def untested(python: Release, torch: Release, triton: Release | None) -> str | None:
    """What of an installation is outside of the releases that were tested, as a sentence; None:
    nothing. triton: None where none is used."""
    first, last = (release(text) for text in PYTHONS)
    if not first <= python[:2] <= last:
        return f"Python {_version_text(python)} is not tested: {PYTHONS[0]} to {PYTHONS[1]} are."
    tested = [(release(text), *map(release, range_)) for text, range_ in TRITONS.items()]
    older = [row for row in tested if row[0] <= torch[:2]]
    newer = [row for row in tested if row[0] >= torch[:2]]
    if not (older and newer):
        oldest, newest = tested[0][0], tested[-1][0]
        return f"torch {_version_text(torch)} is not tested: {_version_text(oldest)} to {_version_text(newest)} are."
    oldest, newest = older[-1][1], newer[0][2]
    if triton is None or oldest <= triton[:2] <= newest:
        return None
    fitting = _version_text(oldest) if oldest == newest else f"{_version_text(oldest)} to {_version_text(newest)}"
    return f"torch {_version_text(torch)} is not tested with Triton {_version_text(triton)}, but with {fitting}."


def _version_text(version: Release) -> str:
    return ".".join(map(str, version[:2]))


def triton_build() -> str | None:
    """Name and version of the package that Triton comes from: "triton-windows 3.6.0", say."""
    for name in ("triton", "triton-windows", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        version = _installed(name)
        if version is not None:
            return f"{name} {version}"
    return None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def here() -> str | None:
    """`untested` of this installation, by what its packages say of themselves; none of them is
    imported. Builds of torch for the CPU alone use no Triton."""
    torch = _installed("torch")
    if torch is None:
        return None
    build = None if torch.endswith("+cpu") else triton_build()
    triton = None if build is None else release(build.rpartition(" ")[2])
    return untested(sys.version_info[:2], release(torch), triton)


def warn() -> None:
    """Say once in a process what of it was not tested."""
    global _warned
    if _warned:
        return
    _warned = True
    problem = here()
    if problem is not None:
        text = f"sparse_bridge: {problem} It may work; `python -m sparse_bridge prove` tells."
        log.warn(text, UserWarning)
