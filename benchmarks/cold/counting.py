"""A Triton driver that counts: kernels are asked for as on one GPU and run, where they must, on an
emulated other one.

What a program compiles depends on the GPU that Triton's driver names and on what the kernels of
maps find. So the driver names the GPU in question, every form that is asked for is kept instead of
compiled, and launches go to the emulator. Large products, which decide nothing, are not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import amd_emulator
import torch
from amd_emulator.triton_driver import Driver

from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.tools.offline_compile.running import processor_seconds

_RUNS_ON = "gfx942"
# SMs, or what ROCm counts as such: RX 7900 XTX, MI300X, RX 9070 XT, RTX 4090, RTX 5090, H100.
UNITS = {"gfx1100": 48, "gfx942": 304, "gfx1201": 32, "sm_89": 128, "sm_120": 170, "sm_90": 132}
_devices = itertools.count(5000)


@dataclasses.dataclass
class Counted:
    """A form that was asked for; stands for Triton's compiled kernel."""

    source: Any
    options: dict[str, Any]
    driver: CountingDriver
    function: Any = None
    packed_metadata: Any = None
    _real: Any = None

    @property
    def name(self) -> str:
        return str(self.source.fn.__name__)

    def result(self) -> Counted:
        return self

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *given: Any) -> None:
        """As Triton calls a launcher: grid, stream, function, metadata, hooks, arguments."""
        grid, stream, arguments = given[:3], given[3], given[9:]
        if self.driver.timing or any(map(self.driver.large, arguments)):
            return
        if self._real is None:
            self._real = self.driver.build(self.source, self.options)
        real = self._real
        real.run(*grid, stream, real.function, real.packed_metadata, None, None, None, *arguments)

    def compile(self) -> float:
        """Processor seconds of compiling it for the GPU in question, as a launch there would."""
        begin = processor_seconds()
        self.driver.compile(self.source, target=self.driver.named, options=self.options)
        return processor_seconds() - begin


class CountingDriver(Driver):
    """asked: the forms, in the order in which they were asked for.  timing: an autotuner is timing
    a form, which need not run for it.  largest: bytes of a tensor of floats that is still computed;
    the self-check's are small."""

    def __init__(self, arch: str, compile_: Callable[..., Any]) -> None:
        from triton.backends.compiler import GPUTarget

        super().__init__(_RUNS_ON)
        found = targets.described(arch)
        number: Any = found.capability if found.backend == "cuda" else arch
        self.named = GPUTarget(found.backend, number, found.warp_size)
        self.compile, self.asked, self.timing = compile_, list[Counted](), False
        self.largest = 1 << 21
        self.device = next(_devices)  # Triton keeps kernels by device
        self.properties = {
            **self.utils.get_device_properties(),
            "max_shared_mem": found.shared_memory,
            "warpSize": found.warp_size,
            "arch": arch,
            "multiprocessor_count": UNITS[arch],
        }
        self.utils.get_device_properties = lambda device=0: self.properties

    def get_current_target(self) -> Any:
        return self.named

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        arch = self.named.arch
        return divmod(arch, 10) if isinstance(arch, int) else (int(arch[3:-2]), 0)

    def ask(self, src: Any, target: Any = None, options: Any = None, **_: Any) -> Counted:
        """In the place of Triton's `compile`."""
        self.asked.append(Counted(src, dict(options or {}), self))
        return self.asked[-1]

    def large(self, argument: Any) -> bool:
        """Whether an argument of a launch is a tensor that is not computed."""
        is_float = isinstance(argument, torch.Tensor) and argument.dtype.is_floating_point
        return is_float and argument.untyped_storage().nbytes() > self.largest

    def build(self, source: Any, options: dict[str, Any]) -> Any:
        """The form for the emulated GPU."""
        kept = {name: options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        return self.compile(source, target=super().get_current_target(), options=kept)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def time(call: Callable[[], object], quantiles: Any = None, **_: Any) -> list[float]:
            self.timing = True
            try:
                call()
            finally:
                self.timing = False
            return [0.0] * len(quantiles or [0])

        return time

    def compile_seconds(self, at_most: int, folder: str) -> list[float]:
        """Of all forms, or of a random sample of so many; folder: an empty one, for Triton."""
        chosen = self.asked
        if at_most and len(chosen) > at_most:
            chosen = random.Random(0).sample(chosen, at_most)
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
            return [form.compile() for form in chosen]


@contextlib.contextmanager
def counting(arch: str, pretend_gpu: bool) -> Iterator[CountingDriver]:
    """Inside, kernels on CPU tensors are counted as on `arch`.

    pretend_gpu: torch says that the GPU is there, for programs that look.
    """
    import triton.compiler
    from triton.runtime import driver as drivers

    driver = CountingDriver(arch, triton.compiler.compile)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(amd_emulator.patch_triton(_RUNS_ON, config=None, fake_cuda=pretend_gpu))
        drivers.set_active(driver)
        enter(mock.patch.object(triton.compiler, "compile", driver.ask))
        if pretend_gpu:
            major, minor = driver.get_device_capability()
            found = torch.cuda.get_device_properties(0)  # the emulated GPU's
            found.major, found.minor, found.gcnArchName, found.name = major, minor, arch, arch
            found.multi_processor_count, found.warp_size = UNITS[arch], driver.named.warp_size
            release = "6.4" if driver.named.backend == "hip" else None
            enter(mock.patch.object(torch.version, "hip", release))
            enter(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (major, minor)))
            # CPU tensors are asked about here.
            enter(mock.patch.object(torch.cpu, "get_device_properties", lambda *_: found, create=True))
        yield driver


def names(forms: Sequence[Counted]) -> dict[str, int]:
    """How many forms of each kernel."""
    found: dict[str, int] = {}
    for form in forms:
        found[form.name] = found.get(form.name, 0) + 1
    return dict(sorted(found.items()))
