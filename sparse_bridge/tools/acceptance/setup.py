"""Where a proof runs and how large its problems are; what a check answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ... import settings
from ...errors import DeviceError
from ...kernels.runtime import target as targets

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of a proof. name: what was checked.  status: PASSED, FAILED or SKIPPED.  detail: one
    sentence.  figures: numbers behind it, as JSON values.  seconds: filled in by the runner."""

    name: str
    status: str
    detail: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def verdict(name: str, problem: str | None, detail: str, **figures: Any) -> Outcome:
    """Passed with `detail`, unless there is a problem."""
    return Outcome(name, PASSED if problem is None else FAILED, problem or detail, figures)


@dataclasses.dataclass(frozen=True)
class Setup:
    """device: of the tensors.  target: whose kernels serve them; None: plain torch does.
    emulated: kernels run on CPU tensors, by the interpreter or an emulated GPU."""

    device: torch.device
    target: targets.Target | None
    emulated: bool

    @staticmethod
    def find(wanted: str = "auto") -> Setup:
        """What this process has: a GPU if there is one, else the CPU, with kernels where Triton has
        a driver for CPU tensors. wanted: "auto" or a torch device.

        Raises: DeviceError for a device that is none, or is not here."""
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        device = _device(wanted)
        if device.type == "cuda":
            device = torch.device("cuda", targets.device_index(device))
        there = targets.unavailable(device) is None
        target = targets.of(device) if there else None
        return Setup(device, target, there and device.type == "cpu")

    @property
    def title(self) -> str:
        """What the device is, in words."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            if self.target is None:
                return f"{name}, plain torch: {targets.unavailable(self.device)}"
            return f"{name} ({self.target.arch})"
        if self.target is None:
            return "CPU, plain torch"
        if self.target.backend == "interpreter":
            return "CPU, kernels in Triton's interpreter"
        return f"emulated {self.target.arch}"

    def rows(self, gpu: int, cpu: int, emulated: int) -> int:
        """The size of a problem that takes seconds here."""
        if self.emulated:
            return emulated
        return gpu if self.device.type == "cuda" else cpu

    @contextlib.contextmanager
    def in_force(self, kernels: bool = True) -> Iterator[None]:
        """Kernels serve CPU tensors if told to. kernels: they can serve what is about to run."""
        forced = self.emulated and kernels and settings.get().dataflow == "auto"
        with settings.override(dataflow="masked" if forced else settings.get().dataflow):
            yield


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, CPU tensors are served by torch: the reference."""
    with settings.override(dataflow="auto"):
        yield


def _device(wanted: str) -> torch.device:
    """Raises: DeviceError for a name that is no device, or not of one that computes here."""
    try:
        device = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:  # torch raises both, by the kind of device
        why = str(error).splitlines()[0]
        raise DeviceError(f"--device {wanted}: {why}; expected cpu, cuda or cuda:1.") from None
    if device.type == "meta":
        raise DeviceError(f"--device {wanted} computes nothing; expected cpu, cuda or cuda:1.")
    return device


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def error_of(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(largest, RMS) error relative to the RMS of `want`, in fp64 on the CPU; infinite where a
    value is not finite."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if not bool(torch.isfinite(got).all()):
        return float("inf"), float("inf")
    scale = max(float(want.square().mean().sqrt()), 1e-30)
    wrong = (got - want).abs() / scale
    return float(wrong.max()) if len(wrong) else 0.0, float(wrong.square().mean().sqrt())
