"""Layers whose tensors do not fit 32-bit offsets: beyond 2 GiB, then beyond 2^31 values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ... import tolerances
from ...core import functional
from ...core.maps.kernel_map import KernelMap
from .setup import SKIPPED, Outcome, Setup, error_of, synchronize, verdict

_SAMPLE = 500  # rows that are computed again
_SIZES = {"2 GiB": 1 << 31, "2^31 values": 1 << 32}  # bytes of fp16 features


def large(setup: Setup) -> Iterator[Outcome]:
    """Forward and gradients at rows that lie before and behind the limits."""
    for title, size in _SIZES.items():
        name = f"beyond {title}"
        if setup.device.type != "cuda":
            yield Outcome(name, SKIPPED, "needs a GPU")
            continue
        channels = 64 if size <= 1 << 31 else 128
        side = side_of(size // (2 * channels) + 1)
        needed = 5 * size + 27 * 4 * 3 * side**3
        free = torch.cuda.mem_get_info(setup.device)[0]
        if free < needed:
            have = f"{free / 2**30:.0f} GiB are free, {needed / 2**30:.0f} are needed"
            yield Outcome(name, SKIPPED, have)
            continue
        torch.cuda.empty_cache()
        try:
            yield large_scene(setup, name, side, channels)
        finally:
            torch.cuda.empty_cache()


def side_of(rows: int) -> int:
    """Of a full cube with more than `rows` cells."""
    side = round(rows ** (1 / 3))
    while side**3 <= rows:
        side += 1
    return side


def large_scene(setup: Setup, name: str, side: int, channels: int) -> Outcome:
    device, dtype = setup.device, torch.float16
    grid = torch.arange(side**3, device=device, dtype=torch.int32)
    coords = torch.stack([torch.zeros_like(grid), grid // side**2, grid // side % side, grid % side], 1)
    cmap = functional.coordinate_map(coords, (side,) * 3, 1)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
    generator = torch.Generator(device).manual_seed(0)
    n = side**3
    x = torch.randn(n, channels, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(27, channels, channels, device=device, dtype=dtype, generator=generator)
    weight /= (27 * channels) ** 0.5
    x.requires_grad_(), weight.requires_grad_()
    y = functional.conv(x, weight, None, kmap)
    # Gradients at a few rows only, so that they can be computed again.
    rows = torch.cat([torch.arange(5), torch.arange(n - 5, n), torch.randint(0, n, (_SAMPLE,))])
    rows = rows.unique().to(device)
    dy = torch.zeros_like(y)
    dy[rows] = torch.randn(len(rows), channels, device=device, dtype=dtype, generator=generator)
    dx, dw = torch.autograd.grad(y, [x, weight], dy)
    synchronize(device)
    limit, errors = tolerances.of("product", "fp16"), {}
    want = _again(kmap, side, rows, x.detach(), weight.detach(), dy)
    touched = want.pop("rows")
    got = {"y": y[rows], "dx": dx[touched], "dw": dw}
    for part, tensor in got.items():
        errors[part] = error_of(tensor, want[part])[0]
    wrong = [f"{part} {error:.1e}" for part, error in errors.items() if error > limit.largest]
    gib = x.numel() * x.element_size() / 2**30
    detail = f"{n:,} rows x {channels} fp16 ({gib:.1f} GiB); largest errors " + ", ".join(
        f"{part} {error:.1e}" for part, error in errors.items()
    )
    problem = f"beyond {limit.largest:.0e}: {', '.join(wrong)}; {detail}" if wrong else None
    return verdict(name, problem, detail, rows=n, channels=channels, **errors)


def _again(
    kmap: KernelMap, side: int, rows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """y of the rows, dw, and dx of the rows that they reach, in fp64 on the CPU, without any map:
    a row of a full cube is its cell."""
    step = torch.tensor([-1, 0, 1])
    offsets = torch.cartesian_prod(step, step, step)  # in the order of `kernel_offsets`
    at = rows.cpu()
    cell = torch.stack([at // side**2, at // side % side, at % side], 1)
    near = cell[:, None] + offsets
    inside = ((near >= 0) & (near < side)).all(2)
    cells = (near * torch.tensor([side**2, side, 1])).sum(2).clamp_(0, side**3 - 1)
    gathered = x[cells.to(x.device).flatten()].cpu().double().unflatten(0, cells.shape)
    gathered *= inside[:, :, None]
    w, gradient = weight.cpu().double(), dy[rows].cpu().double()
    y = torch.einsum("rvi,vio->ro", gathered, w)
    dw = torch.einsum("rvi,ro->vio", gathered, gradient)
    parts = torch.einsum("ro,vio->rvi", gradient, w)
    touched, index = cells[inside].unique(return_inverse=True)
    dx = torch.zeros(len(touched), x.shape[1], dtype=torch.float64)
    dx.index_add_(0, index, parts[inside])
    return {"y": y, "dw": dw, "dx": dx, "rows": touched.to(x.device)}
