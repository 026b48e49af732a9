"""What `warm` runs: layers and networks on a street scan, the way programs run them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core import functional
from ..core.conv.epilogue import Norm
from ..core.maps.coordinate_map import CoordinateMap
from ..core.maps.kernel_map import KernelMap
from ..tools.demo.voxels import street_voxels
from . import warm_names

DTYPES = {name: (getattr(torch, dtype), tf32) for name, (dtype, tf32) in warm_names.DTYPES.items()}
# How layers end in inference: bias, norm, activation.
_ENDS = ((False, False, None), (True, False, None), (True, False, "relu"), (False, True, None), (False, True, "relu"))
_LOSS_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class LayerJob:
    """One layer on maps of several sizes: inference, and with `train` a step under autocast.

    layer_type: "submanifold", "strided" (stride 2) or "inverse" (of strided).  layout: of the weight,
    "ovi" as spconv has it or "vio" as torchsparse and MinkowskiEngine do.
    """

    layer_type: str
    c_in: int
    c_out: int
    kernel: int
    dtype: str
    layout: str
    rows: tuple[int, ...]
    train: bool

    def __str__(self) -> str:
        kernel = "x".join([str(self.kernel)] * 3)
        channels = f"{self.c_in} -> {self.c_out}"
        return f"{self.layer_type} {kernel}, {channels} channels, {self.dtype}, {self.layout}"

    def run(self, device: torch.device) -> None:
        """Run it, largest map first."""
        for rows in sorted(self.rows, reverse=True):
            self._run(self._map(rows, device), device)

    def _map(self, rows: int, device: torch.device) -> KernelMap:
        coords, shape, batch_size = street_voxels(rows)
        cmap: CoordinateMap = functional.coordinate_map(coords.to(device), shape, batch_size)
        kernel = (self.kernel,) * 3
        if self.layer_type == "submanifold":
            return functional.submanifold(cmap, functional.kernel_offsets(kernel))
        padding = (self.kernel - 1) // 2
        offsets = functional.kernel_offsets(kernel, padding=padding)
        outer = functional.conv_shape(shape, kernel, stride=2, padding=padding)
        kmap = functional.strided(cmap, offsets, 2, outer)[1]
        return kmap if self.layer_type == "strided" else functional.inverse(kmap)

    def _run(self, kmap: KernelMap, device: torch.device) -> None:
        dtype, allow_tf32 = DTYPES[self.dtype]
        options: dict[str, Any] = {"layout": self.layout, "allow_tf32": allow_tf32}
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(kmap.n_in, self.c_in, device=device, generator=generator)
        shape: tuple[int, ...] = (kmap.n_offsets, self.c_in, self.c_out)
        if self.layout == "ovi":
            shape = (self.c_out, *[self.kernel] * 3, self.c_in)
        weight = torch.randn(shape, device=device, generator=generator)
        weight /= (kmap.n_offsets * self.c_in) ** 0.5
        bias = torch.zeros(self.c_out, device=device)
        norm = Norm(bias, bias + 1, bias + 1, bias, 1e-3)
        with torch.no_grad():
            rows, matrices = x.to(dtype), weight.to(dtype)
            for biased, normed, activation in _ENDS:
                end: dict[str, Any] = {"norm": norm if normed else None, "activation": activation}
                functional.conv(rows, matrices, bias.to(dtype) if biased else None, kmap, **end, **options)
        if not self.train:
            return
        for shift in (None, bias):
            leaves = [tensor.requires_grad_() for tensor in (x, weight)]
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                y = functional.conv(x, weight, shift, kmap, **options)
            torch.autograd.grad(y.float().square().sum(), leaves)


@dataclasses.dataclass(frozen=True)
class ModelJob:
    """A whole network, as a program with spconv's API runs it."""

    model: str
    dtype: str
    rows: tuple[int, ...]
    train: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}"

    def run(self, device: torch.device) -> None:
        """Run inference and, with `train`, forward and backward, for every number of rows."""
        import sparse_bridge

        with sparse_bridge.enable("spconv"):
            for rows in sorted(self.rows, reverse=True):
                self._run(rows, device)

    def _run(self, rows: int, device: torch.device) -> None:
        import spconv.pytorch as spconv

        from ..tools.networks.spconv import ResidualUNet, Second

        coords, shape, batch_size = street_voxels(rows)
        torch.manual_seed(0)
        model = {"second": Second, "unet": ResidualUNet}[self.model](spconv)
        model = model.to(device)
        features = torch.randn(len(coords), 4, device=device)
        dtype = DTYPES[self.dtype][0]

        def forward() -> torch.Tensor:
            x = spconv.SparseConvTensor(features, coords.to(device), list(shape), batch_size)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                return model(x).features

        if self.train:
            # As a gradient scaler would, or fp16 gradients vanish.
            (_LOSS_SCALE * forward().float().square().mean()).backward()
        model.eval()
        with torch.no_grad():
            forward()


def layer_jobs(
    channels: Sequence[int],
    kernels: Sequence[int],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    rows: Sequence[int],
    train: bool,
) -> Iterator[LayerJob]:
    """The layers that networks of these widths have: odd kernels keep the voxels or halve the grid,
    even ones halve it and undo that; strided layers widen, inverse ones narrow."""
    steps = [(c, c) for c in channels] + list(itertools.pairwise(channels))
    for kernel, dtype, layout in itertools.product(kernels, dtypes, layouts):
        for c_in, c_out in steps:
            same = [("submanifold", c_in, c_out)] if kernel % 2 and c_in == c_out else []
            for layer_type, a, b in [*same, ("strided", c_in, c_out), ("inverse", c_out, c_in)]:
                yield LayerJob(layer_type, a, b, kernel, dtype, layout, tuple(rows), train)
