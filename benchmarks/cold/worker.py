"""One first training step in a process of its own.

`python -m benchmarks.cold.worker PACKAGE NETWORK ARCH ROWS AT_MOST` prints what was compiled, as a
line of JSON. AT_MOST: forms of which the compile seconds are measured, a random sample; 0: all.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.tools.demo.voxels import street_voxels
from sparse_bridge.tools.networks.minkowski import MinkUNet
from sparse_bridge.tools.networks.spconv import ResidualUNet, Second

from .counting import counting, names

# The same three networks for every package; who has not an API cannot run what is written in it.
NETWORKS = {"second": "spconv", "spunet": "spconv", "minkunet": "minkowski"}
MODULES = {
    ("sparse_bridge", "spconv"): "spconv.pytorch",
    ("sparse_bridge", "minkowski"): "MinkowskiEngine",
    ("spconv_triton", "spconv"): "spconv_triton.pytorch",
}


def _spconv_step(network: str, package: str, rows: int) -> Callable[[], Any]:
    sp = importlib.import_module(MODULES[package, "spconv"])
    coords, shape, batch = street_voxels(rows)
    model = (Second(sp) if network == "second" else ResidualUNet(sp)).half()
    features = torch.randn(len(coords), 4).half()
    return lambda: model(sp.SparseConvTensor(features, coords, list(shape), batch)).features


def _minkowski_step(package: str, rows: int) -> Callable[[], Any]:
    ME = importlib.import_module(MODULES[package, "minkowski"])
    coords, model = street_voxels(rows)[0], MinkUNet(ME, 4).half()
    features = torch.randn(len(coords), 4).half()
    return lambda: model(ME.SparseTensor(features, coordinates=coords)).F


def first_step(package: str, network: str, rows: int) -> None:
    """Forward and backward in fp16 on a street scan."""
    api = NETWORKS[network]
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if package == "sparse_bridge":
            stack.enter_context(sparse_bridge.enable(api))
            stack.enter_context(settings.override(dataflow="masked"))
        if api == "spconv":
            forward = _spconv_step(network, package, rows)
        else:
            forward = _minkowski_step(package, rows)
        forward().float().square().mean().backward()


def main(package: str, network: str, arch: str, rows: int, at_most: int) -> dict[str, Any]:
    """What was compiled, and for how long."""
    with counting(arch, pretend_gpu=package != "sparse_bridge") as driver:
        first_step(package, network, rows)
        with tempfile.TemporaryDirectory() as folder:
            seconds = driver.compile_seconds(at_most, folder)
    return {"forms": len(driver.asked), "kernels": names(driver.asked), "seconds": [round(one, 2) for one in seconds]}


if __name__ == "__main__":
    package, network, arch, rows, at_most = sys.argv[1:]
    print(json.dumps(main(package, network, arch, int(rows), int(at_most))))
