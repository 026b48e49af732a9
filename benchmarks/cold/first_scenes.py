"""The first scenes of a process, on a GPU: a U-Net on street scans, each of another shape.

    TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.cold.first_scenes
    TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.cold.first_scenes --threads

--threads: without worker processes. A second run with the same cache tells a warm start.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch

import sparse_bridge
from sparse_bridge.tools.demo.voxels import street_voxels
from sparse_bridge.tools.networks.spconv import ResidualUNet


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device: str, count: int) -> list[float]:
    """Of each scene in fp16 inference, from the first call to the end of its kernels."""
    import spconv.pytorch as sp

    scans = [street_voxels(21_000 + 3_850 * (7 * turn % 20)) for turn in range(count)]
    model, found = ResidualUNet(sp).to(device).half().eval(), list[float]()
    for turn, (coords, shape, batch) in enumerate(scans):
        spatial = [side + 16 * (turn % 5) for side in shape]
        x, coords = torch.randn(len(coords), 4, device=device).half(), coords.to(device)
        _wait(device)
        begin = time.perf_counter()
        with torch.no_grad():
            model(sp.SparseConvTensor(x, coords, spatial, batch))
        _wait(device)
        found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold.first_scenes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scenes", type=int, default=20)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--log", action="store_true", help="what the package says while it works")
    args = parser.parse_args()
    if args.log:
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)d ms %(message)s")
    if args.threads:
        from sparse_bridge.kernels.runtime import compile_processes

        compile_processes.enabled = False
    with sparse_bridge.enable("spconv", mode="standin"):
        found = seconds(args.device, args.scenes)
    rest = found[1:] or [0.0]
    print(
        f"{'threads' if args.threads else 'processes'}: first scene {found[0]:.2f} s, "
        f"all {len(found)} {sum(found):.2f} s, slowest later one {max(rest):.2f} s, "
        f"last {found[-1] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
