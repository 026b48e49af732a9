"""The one place that asks what a device is: its generation, wave size, memory, and whether Triton
drives it. What a generation can do, `architectures` says.

Kernels run on CUDA and HIP tensors, and on CPU tensors whenever Triton has a driver for those: its
interpreter, or any other runtime installed as Triton's active driver.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from typing import Any

import torch

from ... import log, state
from ...errors import DeviceError
from .architectures import generation_of
from .generation import Generation

MINIMUM_TRITON = (3, 0)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a launcher needs to know about the device behind a tensor.

    backend: "cuda", "hip", "xpu" or "interpreter".  arch: "sm_90", "gfx942", ... or "interpreter".
    warp_size: lanes of a warp (wave).  compute_units: SMs / CUs.  shared_memory: bytes per
    workgroup. raw: compiled kernels may be launched directly (a real GPU); otherwise through
    Triton's ordinary call.
    """

    backend: str
    arch: str
    warp_size: int
    compute_units: int
    shared_memory: int
    raw: bool

    @functools.cached_property
    def generation(self) -> Generation:
        """The record of its architecture."""
        return generation_of(self.backend, self.arch)

    @property
    def family(self) -> str:
        """Name of its generation: turing, ampere, ada, hopper, blackwell, cdna2, cdna3, cdna4,
        rdna3, rdna4, or generic for what nobody has tabulated."""
        return self.generation.family

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability times ten; 0 elsewhere."""
        return int(self.arch.removeprefix("sm_")) if self.backend == "cuda" else 0

    @functools.cached_property
    def takes_addresses(self) -> bool:
        """Whether a compiled kernel runs the same on an address as on its tensor. On HIP the size
        of a tensor's memory is part of the specialisation."""
        return self.raw and not self.generation.small_pointers

    @property
    def has_bf16(self) -> bool:
        """Whether kernels multiply bf16."""
        return self.generation.bf16

    @property
    def has_tf32(self) -> bool:
        """Whether products of fp32 may round their inputs to TF32 (AMD: xf32)."""
        return self.generation.tf32

    @property
    def splits_fp32(self) -> bool:
        """Whether an fp32 product is faster as three of TF32: NVIDIA's data-centre parts."""
        return self.generation.chip(self.arch).splits_fp32

    @property
    def queues_rows(self) -> bool:
        """Whether gather-GEMMs keep the rows of several steps under way (Triton 3.5 and newer)."""
        return self.generation.queues_rows and (triton_version() or (0,)) >= (3, 5)

    @property
    def adds_in_fp16(self) -> bool:
        """Whether matrix units add fp16 products up in fp16, where they are asked to."""
        return self.backend == "cuda" and self.has_matrix_units

    @property
    def has_matrix_units(self) -> bool:
        """Whether Triton's `tl.dot` of half types becomes matrix instructions."""
        return bool(self.generation.matrix)


@functools.lru_cache(maxsize=1)
def triton_version() -> tuple[int, ...] | None:
    """Installed Triton's version, or None when it is missing or cannot be imported."""
    try:
        import triton
    # a broken Triton (wrong LLVM, missing driver stub) must read as "no Triton", whatever it raises
    except Exception:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


def interpreted() -> bool:
    """True when kernels of this process run in Triton's interpreter (`TRITON_INTERPRET=1` before
    import)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def device_index(device: torch.device) -> int:
    """CUDA / HIP ordinal behind `device`; -1 for the CPU."""
    if device.type != "cuda":
        return -1
    index = device.index
    return torch.cuda.current_device() if index is None else index


def copies_aside() -> bool:
    """Whether a copy from pageable memory to a GPU is made aside before the call returns, without
    waiting for the GPU. CUDA promises it; pinning memory costs the host more than such a copy."""
    return torch.version.hip is None


def current_stream(device: torch.device) -> int:
    """Number of the current stream of a GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(device_index(device))
    return stream


def capturing(device: torch.device) -> bool:
    """Whether launches on the current stream of a GPU become part of a graph."""
    return device.type == "cuda" and bool(torch._C._cuda_isCurrentStreamCapturing())


def unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of `device`, or None when they can."""
    version = triton_version()
    if version is None:
        where = "layers on a CPU need none" if device.type == "cpu" else _where_from()
        return f"Triton is not installed or cannot be imported ({where})"
    if version < MINIMUM_TRITON:
        return f"Triton {'.'.join(map(str, version))} is older than 3.0"
    if device.type == "cuda":
        return _gpu_unavailable(device_index(device))
    if device.type == "xpu":
        return _xpu_unavailable()
    if device.type == "cpu":
        if interpreted() or _host_driver() is not None:
            return None
        return "CPU tensors reach Triton kernels only under TRITON_INTERPRET=1 or another active Triton driver"
    return f"no Triton driver for device type {device.type!r}"


def _where_from() -> str:
    if sys.platform == "win32":
        return "pip install triton-windows, in the release that fits this torch"
    if sys.platform == "darwin":
        return "there is none for macOS"
    return "torch's own Triton is the right one: reinstall torch"


@functools.cache
def _xpu_unavailable() -> str | None:
    """Intel's GPUs are driven by Triton builds with the XPU backend, which torch's XPU builds
    bring."""
    if interpreted():
        return "TRITON_INTERPRET=1 is set: kernels run on CPU tensors only"
    try:
        from triton.runtime import driver

        backend = driver.active.get_current_target().backend
    except Exception as error:  # whatever a driver raises where it finds no device
        return f"Triton has no working driver for XPU devices: {error}"
    return None if backend == "xpu" else f"Triton drives {backend!r} here, not 'xpu'"


@functools.cache
def _gpu_unavailable(index: int) -> str | None:
    if interpreted():
        return "TRITON_INTERPRET=1 is set: kernels run on CPU tensors only"
    if torch.version.hip is None and torch.cuda.get_device_capability(index) < (7, 5):
        return "the GPU is older than compute capability 7.5"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # from RuntimeError to OSError, for a GPU that it does not know
        return f"Triton has no working driver for {torch.cuda.get_device_name(index)}: {error}"
    return None


def _host_driver() -> object | None:
    """Triton's active driver when it works on CPU tensors."""
    from triton.runtime import driver

    # Reading `driver.active` would create a GPU driver; Triton 3.0 keeps it as a lazy proxy.
    active = driver._active if hasattr(driver, "_active") else driver.active
    if active is None or type(active).__name__ == "LazyProxy":
        return None
    try:
        return active if active.get_active_torch_device().type == "cpu" else None
    except (AttributeError, RuntimeError):
        return None


def of(device: torch.device) -> Target:
    """The target behind tensors of `device`; call only when `unavailable(device)` is None."""
    if device.type == "cuda":
        return _gpu_target(device_index(device))
    if device.type == "xpu":
        return _xpu_target(device.index or 0)
    if interpreted():
        return Target("interpreter", "interpreter", 32, 4, 1 << 20, raw=False)
    driver = _host_driver()
    assert driver is not None
    described = driver.get_current_target()  # type: ignore[attr-defined]
    utils: Any = getattr(driver, "utils", None)
    properties = utils.get_device_properties(0) if hasattr(utils, "get_device_properties") else {}
    units = properties.get("multiprocessor_count", 8)
    return make_target(described.backend, described.arch, described.warp_size, units, None, raw=False)


@functools.cache
def _gpu_target(index: int) -> Target:
    from triton.runtime import driver

    with torch.cuda.device(index):
        described = driver.active.get_current_target()
        properties = torch.cuda.get_device_properties(index)
        shared = getattr(properties, "shared_memory_per_block_optin", None)
    units = properties.multi_processor_count
    return make_target(described.backend, described.arch, described.warp_size, units, shared, raw=True)


@functools.cache
def _xpu_target(index: int) -> Target:
    """Launched through Triton's ordinary call: `raw` is about CUDA and HIP launchers."""
    from triton.runtime import driver

    described = driver.active.get_current_target()
    properties = torch.xpu.get_device_properties(index)
    units = getattr(properties, "gpu_subslice_count", 0) or properties.max_compute_units
    return make_target("xpu", "xpu", described.warp_size, units, None, raw=False)


def make_target(backend: str, arch: object, warp: int | None, units: int, shared: int | None, raw: bool) -> Target:
    """A target from what drivers say of a device.

    arch: compute capability without a point (90), or the name of a HIP or XPU architecture.  warp:
    lanes; None for the generation's.  units: compute units.  shared: bytes of shared memory of a
    block, as torch reports them; of HIP, and where it is None, the table of chips says.  raw: see
    `Target`. An architecture that is in no table is logged once.
    """
    name = f"sm_{arch}" if backend == "cuda" else str(arch)
    generation = generation_of(backend, name)
    if backend == "hip" or shared is None:  # torch reports other limits than a HIP workgroup's
        shared = generation.chip(name).shared_memory << 10
    if generation.family == "generic":
        log.once(
            ("unknown-gpu", name),
            f"{name} is not in the tile tables of sparse_bridge; its kernels use tiles that fit "
            f"{shared >> 10} KiB of shared memory on any GPU.",
        )
    return Target(backend, name, warp or generation.warp_size, units, shared, raw)


def described(arch: str, compute_units: int = 64) -> Target:
    """The target of an architecture that need not be there: "gfx942", "sm_90".

    Raises: DeviceError for a name of neither kind.
    """
    if re.fullmatch(r"gfx\d+[0-9a-f]{2}", arch):
        return make_target("hip", arch, None, compute_units, None, raw=False)
    if re.fullmatch(r"sm_\d+", arch):
        return make_target("cuda", int(arch[3:]), None, compute_units, None, raw=False)
    raise DeviceError(f"architecture {arch!r}; expected a name like gfx942 or sm_90.")


@state.owns
def reset() -> None:
    """Forget what was found out about Triton, its drivers and the GPUs."""
    for query in (triton_version, _xpu_unavailable, _gpu_unavailable, _gpu_target, _xpu_target):
        query.cache_clear()
