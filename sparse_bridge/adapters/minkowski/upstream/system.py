"""What MinkowskiEngine says about the machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import torch


def is_cuda_available() -> bool:
    """Whether tensors can live on a GPU (CUDA or ROCm)."""
    return torch.cuda.is_available()


def cuda_version() -> int:
    """CUDA's version as torch was built, like 12080; -1 without CUDA."""
    version = torch.version.cuda
    if version is None:
        return -1
    major, minor = (int(part) for part in version.split(".")[:2])
    return 1000 * major + 10 * minor


def cudart_version() -> int:
    """The same as `cuda_version`: torch brings its own runtime."""
    return cuda_version()


def get_gpu_memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current GPU; (0, 0) without one."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)


def parse_nvidia_smi() -> dict[str, str]:
    """What `nvidia-smi -q` says in lines of "name : value", of the driver and the first GPU. Empty
    where there is no such program, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    done = subprocess.run([program, "-q"], capture_output=True, text=True, check=False)
    fields: dict[str, str] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, separator, value = line.partition(" : ")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields


def diagnostics(version: str) -> str:
    """A report of the platform, torch and GPUs."""
    lines = [
        "==========System==========",
        platform.platform(),
        sys.version.replace("\n", " "),
        "==========Pytorch==========",
        torch.__version__,
        f"torch.cuda.is_available(): {torch.cuda.is_available()}",
        f"CUDA {torch.version.cuda}, HIP {torch.version.hip}",
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines += ["==========GPU==========", *names]
    driver = parse_nvidia_smi()
    if driver:
        lines += ["==========NVIDIA driver=========="]
        lines += [f"{name}: {driver[name]}" for name in ("Driver Version", "CUDA Version") if name in driver]
    lines += [
        "==========MinkowskiEngine==========",
        f"{version}, answered by sparse_bridge; nothing is compiled at installation",
        f"MinkowskiEngine compiled with CUDA Support: {is_cuda_available()}",
    ]
    return "\n".join(lines)
