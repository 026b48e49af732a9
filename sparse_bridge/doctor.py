"""`python -m sparse_bridge doctor`: what this machine offers, and what `enable()` does on it."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import TYPE_CHECKING, Any

from . import settings
from ._version import __version__
from .adapters import base, lifecycle
from .adapters.import_hook import installed
from .errors import SparseBridgeError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

__all__ = ["collect", "show"]

_PREFIX = "SPARSE_BRIDGE_"


def collect() -> dict[str, Any]:
    """Everything that `doctor` knows, as JSON values; imports torch and installed frameworks."""
    environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIX)}
    known = {_PREFIX + field.name.upper() for field in dataclasses.fields(settings.Settings)}
    in_force = dataclasses.asdict(settings.get())
    return {
        "sparse_bridge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_torch_facts(),
        "frameworks": [_framework(name) for name in base.ADAPTERS],
        "settings": in_force,
        "environment": environment,
        "unknown_variables": [name for name in environment if name not in known],
    }


def _torch_facts() -> dict[str, Any]:
    """Versions and devices."""
    try:
        import torch

        from .kernels import target
    except ImportError as error:
        return {"torch": None, "torch_problem": str(error), "triton": None, "devices": []}
    triton = target.triton_version()
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "torch_problem": None,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "triton": triton and ".".join(map(str, triton)),
        "devices": [_device(device) for device in devices],
    }


def _device(device: torch.device) -> dict[str, Any]:
    """Name, architecture and memory of a device, and why Triton kernels do not run there, if so."""
    import torch

    from .kernels import target

    problem = target.unavailable(device)
    found = None if problem is not None else target.of(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = platform.processor() or platform.machine(), None
    return {
        "device": str(device),
        "name": name,
        "memory_bytes": memory,
        "architecture": found and found.arch,
        "family": found and found.family,
        "triton_problem": problem,
    }


def _framework(name: str) -> dict[str, Any]:
    """What is installed of one framework, and how `enable()` answers it: tried out, then undone."""
    facts: dict[str, Any] = {"framework": name, "supported": None, "installed": None}
    facts |= {"mode": None, "version": None, "reason": None, "notes": []}
    try:
        adapter = base.load(name)
        facts |= {"supported": adapter.versions, "installed": installed(adapter.packages[0])}
        with lifecycle.enable(name) as handle:
            status = handle.status()[name]
            facts |= {"mode": status.mode, "version": status.version, "reason": status.reason}
            facts["notes"] = list(status.notes)
    except SparseBridgeError as error:
        facts["reason"] = str(error)
    return facts


def show(facts: dict[str, Any], console: Console) -> None:
    """Print `collect()`'s answer as tables."""
    console.print(_machine_table(facts))
    console.print(_framework_table(facts))
    console.print(_settings_table(facts))
    for name in facts["unknown_variables"]:
        console.print(f"{name} is set, but sparse_bridge has no such setting.", style="yellow")


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    table.columns[0].no_wrap = True
    return table


def _machine_table(facts: dict[str, Any]) -> Table:
    table = _table("Machine", "what", "found")
    table.add_row("sparse_bridge", facts["sparse_bridge"])
    table.add_row("Python", f"{facts['python']} on {facts['platform']}")
    build = [f"{k} {facts[k.lower()]}" for k in ("CUDA", "ROCm") if facts.get(k.lower())]
    torch = facts["torch"] and f"{facts['torch']} ({', '.join(build) or 'CPU build'})"
    table.add_row("torch", torch or f"cannot be imported: {facts['torch_problem']}")
    table.add_row("Triton", facts["triton"] or "cannot be imported")
    for device in facts["devices"]:
        words = [device["name"]]
        if device["memory_bytes"]:
            words.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
        if device["triton_problem"]:
            words.append(f"served by plain torch: {device['triton_problem']}")
        else:
            words.append(f"Triton kernels for {device['architecture']}, {device['family']} tiles")
        table.add_row(device["device"], "; ".join(words))
    return table


def _framework_table(facts: dict[str, Any]) -> Table:
    table = _table("Frameworks", "name", "installed", "enable() uses", "version", "why")
    for one in facts["frameworks"]:
        why = "\n".join([one["reason"] or "", *one["notes"]]).strip()
        there = {True: "yes", False: "no", None: "?"}[one["installed"]]
        mode, version = one["mode"] or "nothing", one["version"] or "-"
        table.add_row(one["framework"], there, mode, version, why)
    return table


def _settings_table(facts: dict[str, Any]) -> Table:
    table = _table("Settings", "setting", "in force", "variable")
    for name, value in facts["settings"].items():
        variable = _PREFIX + name.upper()
        given = facts["environment"].get(variable)
        table.add_row(name, str(value), variable + ("" if given is None else f"={given}"))
    return table
