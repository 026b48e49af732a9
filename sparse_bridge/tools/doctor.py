"""`python -m sparse_bridge doctor`: what this machine offers, and what `enable()` does on it.

The answer is what a bug report needs: versions, devices and whether their kernels compute right,
frameworks, caches, settings and the environment variables that bear on any of it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import os
import pathlib
import platform
from typing import TYPE_CHECKING, Any

from .. import _version, folders, native, releases, settings, workers
from ..adapters import base, lifecycle
from ..adapters.import_hook import installed
from ..errors import SettingError, SparseBridgeError
from ..native import build

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..kernels.runtime.target import Target

_PREFIX = settings.PREFIX
# Variables that change which device, library, compiler switch or allocator is used.
_BEARING = (
    _PREFIX + "*",
    "TRITON_*",
    "AMDGCN_*",
    "PYTORCH_*",
    "TORCH_*",
    "CUDA_*",
    "CUBLAS_*",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "HIP_*",
    "HSA_*",
    "ROCM_*",
    "ROCR_*",
    "ROCBLAS_*",
    "HIPBLASLT_*",
    "OMP_*",
    "KMP_*",
    "MKL_NUM_THREADS",
    "XDG_CACHE_HOME",
)


def collect(self_check: bool = True) -> dict[str, Any]:
    """Everything that `doctor` knows, as JSON values; imports torch and installed frameworks, and
    runs the self-check of every GPU unless told not to."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _BEARING)
    }
    own = [name.removeprefix(_PREFIX) for name in environment if name.startswith(_PREFIX)]
    return {
        "sparse_bridge": _version.described(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_torch_facts(self_check),
        "frameworks": [_framework(name) for name in base.ADAPTERS],
        "native": native.described(),
        "caches": _caches(cache_folders()),
        "settings": dataclasses.asdict(settings.get()),
        "environment": environment,
        "renamed_variables": {_PREFIX + n: new for n, new in settings.RENAMED.items() if n in own},
        "unknown_variables": list(settings.unknown_variables(os.environ)),
    }


def _torch_facts(self_check: bool) -> dict[str, Any]:
    """Versions and devices."""
    try:
        import torch

        from ..core.device import known_faults, rocm
        from ..core.tuning import tune_cache
        from ..kernels.runtime import target
    except ImportError as error:
        return {"torch": None, "torch_problem": str(error), "triton": None, "devices": []} | {"warnings": []}
    triton = target.triton_version()
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    described = [_device(device, self_check) for device in devices]
    archs = tuple(facts["architecture"] for facts in described[1:] if facts["architecture"])
    machine = known_faults.Machine(torch.version.hip, triton, archs, os.environ, settings.get().capture)
    said = [releases.here(), rocm.allocator_warning(), *known_faults.of(machine)]
    if settings.get().tune_file:
        try:
            tune_cache.pinned(settings.get().tune_file)
        except SettingError as error:
            said.append(str(error))
    return {
        "torch": torch.__version__,
        "torch_problem": None,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "triton": triton and ".".join(map(str, triton)),
        "triton_build": releases.triton_build(),
        "warnings": [text for text in said if text],
        "devices": described,
        "cpu": {
            "cores": workers.cores(),
            "threads": torch.get_num_threads(),
            "wait_policy": os.environ.get(workers.WAIT_POLICY, "active").lower(),
        },
    }


def _device(device: torch.device, self_check: bool) -> dict[str, Any]:
    """Name, architecture and memory of a device, and why Triton kernels do not run there, if so."""
    import torch

    from ..kernels.runtime import target

    problem = target.unavailable(device)
    kernel_target = None if problem is not None else target.of(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = platform.processor() or platform.machine(), None
    return {
        "device": str(device),
        "name": name,
        "memory_bytes": memory,
        "architecture": kernel_target and kernel_target.arch,
        "family": kernel_target and kernel_target.family,
        "warp_size": kernel_target and kernel_target.warp_size,
        "compute_units": kernel_target and kernel_target.compute_units,
        "shared_memory_bytes": kernel_target and kernel_target.shared_memory,
        "triton_problem": problem,
        "self_check": _self_check(device, kernel_target) if kernel_target is not None and self_check else [],
    }


def _self_check(device: torch.device, kernel_target: Target) -> list[dict[str, Any]]:
    """The verdict on every part of a GPU; nothing where a CPU merely plays one."""
    import torch

    from ..core.device import self_check

    if device.type == "cpu":
        return []
    verdicts = []
    for part in self_check.parts_of(kernel_target):
        try:
            verdict = self_check.run(device, kernel_target, part)
        except torch.cuda.OutOfMemoryError:
            reason = "not checked: the GPU has no memory left"
            verdict = self_check.Verdict(str(device), part, reason, 0.0)
        verdicts.append(dataclasses.asdict(verdict))
    return verdicts


def cache_folders() -> dict[str, pathlib.Path]:
    """Where tuned tiles, the compiled helper in C, the compiled player and compiled kernels are kept. One may lie in
    another: what it holds is not of the outer one."""
    try:
        from ..export.player import library
        from ..kernels.runtime import target
    except ImportError:  # no torch: nothing is kept
        return {}
    paths = {"tuning": folders.cache(), "helper in C": build.library_folder(), "player": library.library_folder()}
    if target.triton_version() is not None:
        from ..kernels.runtime import triton_compat

        paths["Triton"] = triton_compat.triton_cache()
    return paths


def _caches(places: dict[str, pathlib.Path]) -> list[dict[str, Any]]:
    """Name, place, number of files and bytes of every cache."""
    return [_cache(name, folder, {*places.values()} - {folder}) for name, folder in places.items()]


def _cache(name: str, folder: pathlib.Path, others: set[pathlib.Path]) -> dict[str, Any]:
    """Place, number of files and bytes of a cache without `others` inside; files may come and go meanwhile."""
    files = size = 0
    for path, inside, names in os.walk(folder):
        inside[:] = [one for one in inside if pathlib.Path(path, one) not in others]
        for file in names:
            try:
                size += os.stat(os.path.join(path, file)).st_size
            except OSError:
                continue
            files += 1
    return {"cache": name, "folder": str(folder), "files": files, "bytes": size}


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
    if any(device["self_check"] for device in facts["devices"]):
        console.print(_check_table(facts))
    console.print(_framework_table(facts))
    console.print(_cache_table(facts))
    console.print(_settings_table(facts))
    if facts["environment"]:
        console.print(_environment_table(facts))
    for warning in facts["warnings"]:
        console.print(warning, style="yellow")
    for name, new in facts["renamed_variables"].items():
        console.print(f"{name} is called {new} now.", style="yellow")
    for text in settings.unknown_variables(dict.fromkeys(facts["unknown_variables"], "")).values():
        console.print(text, style="yellow")


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
    triton = facts["triton"] or _without_triton(facts)
    origin = facts.get("triton_build")
    table.add_row("Triton", f"{triton} ({origin})" if origin else triton)
    table.add_row("helper in C", facts["native"])
    if facts.get("cpu"):
        table.add_row("CPU threads", threads_of(facts["cpu"]))
    for device in facts["devices"]:
        words = [device["name"]]
        if device["memory_bytes"]:
            words.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
        if device["triton_problem"]:
            words.append(f"served by plain torch: {device['triton_problem']}")
        else:
            words.append(f"Triton kernels for {device['architecture']}, {device['family']} tiles")
            words.append(
                f"{device['compute_units']} compute units, waves of {device['warp_size']}, "
                f"{device['shared_memory_bytes'] >> 10} KiB shared memory"
            )
        table.add_row(device["device"], "; ".join(words))
    return table


def _without_triton(facts: dict[str, Any]) -> str:
    """In words that alarm nobody who has no GPU: torch's CPU builds bring no Triton."""
    gpus = len(facts["devices"]) > 1
    there = importlib.util.find_spec("triton") is not None
    what = "cannot be imported" if there else "not installed"
    return what if gpus else f"{what}; only layers on a GPU need it"


def threads_of(cpu: dict[str, Any]) -> str:
    text = f"{cpu['threads']} on {cpu['cores']} cores"
    if cpu["threads"] > 1 and cpu["wait_policy"] != "passive":
        text += (
            "; they spin while they wait. Beside other work, layers on the CPU take many times as "
            f"long: set {workers.WAIT_POLICY}=passive before torch is imported"
        )
    return text


def _check_table(facts: dict[str, Any]) -> Table:
    table = _table("Self-check", "device", "part", "result", "time")
    for verdict in (verdict for device in facts["devices"] for verdict in device["self_check"]):
        result = verdict["problem"] or "passed"
        took = f"{verdict['milliseconds']:.0f} ms"
        table.add_row(verdict["device"], verdict["part"], result, took)
    return table


def _cache_table(facts: dict[str, Any]) -> Table:
    table = _table("Caches", "cache", "files", "MiB", "folder")
    for cache in facts["caches"]:
        mebibytes = f"{cache['bytes'] / 2**20:.1f}"
        table.add_row(cache["cache"], str(cache["files"]), mebibytes, cache["folder"])
    return table


def _environment_table(facts: dict[str, Any]) -> Table:
    table = _table("Environment", "variable", "value")
    for name, value in facts["environment"].items():
        table.add_row(name, value)
    return table


def _framework_table(facts: dict[str, Any]) -> Table:
    table = _table("Frameworks", "name", "installed", "enable() uses", "version", "why")
    for framework in facts["frameworks"]:
        why = "\n".join([framework["reason"] or "", *framework["notes"]]).strip()
        there = {True: "yes", False: "no", None: "?"}[framework["installed"]]
        mode, version = framework["mode"] or "nothing", framework["version"] or "-"
        table.add_row(framework["framework"], there, mode, version, why)
    return table


def _settings_table(facts: dict[str, Any]) -> Table:
    table = _table("Settings", "setting", "in force", "variable")
    for name, keywords in settings.KEYWORDS.items():
        value = facts["environment"].get(_PREFIX + name)
        variable = _PREFIX + name + ("" if value is None else f"={value}")
        for keyword in keywords:
            table.add_row(keyword, str(facts["settings"][keyword]), variable)
    return table
