"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from sparse_bridge import _version

__all__ = ["commit", "describe"]


def describe(device: str) -> dict[str, Any]:
    """Names of the processors, their number, system, driver and the commit that was measured."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "sparse_bridge": _installed(),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = _answer(query) or "unknown to nvidia-smi"
    if name := commit():
        found["commit"] = name
    return found


def commit() -> str:
    """The commit of this checkout, and whether files differ from it; empty where git has none."""
    name, changed = _version.commit()
    return name + (" with changes" if changed else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _installed() -> str:
    try:
        return importlib.metadata.version("sparse-bridge")
    except importlib.metadata.PackageNotFoundError:
        return _version.__version__


def _answer(command: list[str]) -> str:
    """The first line that a tool prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
