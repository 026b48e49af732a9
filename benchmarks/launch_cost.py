"""What a launch of a compiled kernel costs the host: `python -m benchmarks.launch_cost`.

A kernel of four arguments on a GPU: by the compiled helper, by Triton's launcher as this release
has it, by its launcher object, and as `kernel[grid](...)`. Microseconds: the least and the median
of runs of a hundred launches, each behind a wait for the GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from sparse_bridge.kernels.runtime import triton_compat

_RUNS, _EACH = 32, 100


def _timed(launch: Callable[[], object]) -> tuple[float, float]:
    """(least, median) microseconds of a launch."""
    found = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_EACH):
            launch()
        found.append((time.perf_counter() - begin) / _EACH * 1e6)
    return min(found), statistics.median(found)


def main() -> None:
    import triton
    import triton.language as tl

    def _one(x_ptr, y_ptr, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr, number)

    kernel = triton.jit(_one)
    x = torch.zeros(64, device="cuda", dtype=torch.int32)
    compiled = kernel[(1,)](x, x, 3, 4)
    stream, at = torch._C._cuda_getCurrentRawStream(x.device.index), x.data_ptr()

    def by(entry: triton_compat.Entry) -> Callable[[], object]:
        call, before, between = entry
        return lambda: call(*before, 1, 1, 1, stream, *between, at, at, 3, 4)

    ways = {"the helper": by(triton_compat.launcher_of(compiled))}
    with mock.patch.object(triton_compat, "native_launcher", lambda *_: None):
        ways["Triton's launcher, by address"] = by(triton_compat.launcher_of(compiled))
    between = (compiled.function, compiled.packed_metadata, None, None, None)
    ways["Triton's launcher object"] = by((compiled.run, (), between))
    ways["kernel[grid]"] = lambda: kernel[(1,)](x, x, 3, 4)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for name, launch in ways.items():
        least, median = _timed(launch)
        print(f"{name:32} {least:6.2f} {median:6.2f} us")


if __name__ == "__main__":
    main()
