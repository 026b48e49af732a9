"""Maps, products and pools of a device, compared with plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ... import tolerances
from ...core import functional
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from .setup import SKIPPED, Outcome, Setup, error_of, plain_torch, verdict

_DTYPES = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp64": (torch.float64, False),
}
_CHANNELS = ((32, 64), (17, 33))
_KINDS = ("submanifold", "strided", "inverse", "generative", "between")
Built = tuple[torch.Tensor, KernelMap]


def cloud(rows: int, far: bool = False, repeats: bool = False) -> torch.Tensor:
    """int32 [rows, 4]: clusters in two batch items, in random order. far: scattered over a grid
    that needs 64-bit keys.  repeats: every tenth row equals an earlier one."""
    generator = torch.Generator().manual_seed(5)
    side = max(4, round((rows * 2) ** (1 / 3)))
    sites = torch.randperm(2 * side**3, generator=generator)[:rows]
    coords = torch.stack(torch.unravel_index(sites, (2, side, side, side)), 1).int()
    if far:
        coords[:, 1:] += torch.tensor([0, 1 << 19, 1 << 14], dtype=torch.int32)[
            torch.randint(0, 3, (rows, 1), generator=generator)
        ]
    if repeats:
        coords[9::10] = coords[: len(coords[9::10])]
    return coords.contiguous()


def build(layer: str, coords: torch.Tensor, far: bool = False) -> Built:
    """(coordinates of the outputs, kernel map) of one kind of layer."""
    shape = (1 << 20, 1 << 20, 1 << 20) if far else None
    cmap = functional.coordinate_map(coords, shape, 2)
    three, two = (functional.kernel_offsets((3, 3, 3)), functional.kernel_offsets((2, 2, 2), padding=0))
    if layer == "submanifold":
        return coords, functional.submanifold(cmap, three)
    if layer == "between":
        outer: CoordinateMap = functional.strided(cmap, two, 2)[0]
        return outer.coords, functional.between(cmap, outer, three, 2)
    if layer == "inverse":
        return coords, functional.inverse(functional.strided(cmap, two, 2)[1])
    expanded, kmap = getattr(functional, layer)(cmap, three if layer == "strided" else two, 2)
    return expanded.coords, kmap


def _pairs(kmap: KernelMap) -> list[torch.Tensor]:
    """[2, P] input and output rows per kernel offset, by output row."""
    pairs = []
    for v in range(kmap.n_offsets):
        x_rows, y_rows = (rows.cpu().long() for rows in kmap.pair_list(v))
        order = torch.argsort(y_rows * (kmap.n_in + 1) + x_rows)
        pairs.append(torch.stack([x_rows[order], y_rows[order]]))
    return pairs


def maps(setup: Setup) -> Iterator[Outcome]:
    """Every kind of kernel map is the one that plain torch finds, row for row."""
    rows = setup.rows(60_000, 20_000, 300)
    for title, far, repeats in (("32-bit keys", False, False), ("64-bit keys", True, False), ("repeats", False, True)):
        coords = cloud(rows, far, repeats)
        wrong, count = [], 0
        for layer in _KINDS:
            with plain_torch():
                want_coords, want = build(layer, coords, far)
                want_pairs = _pairs(want)
            with setup.in_force():
                got_coords, got = build(layer, coords.to(setup.device), far)
                got_pairs = _pairs(got)
            count += sum(pairs.shape[1] for pairs in want_pairs)
            same = torch.equal(got_coords.cpu(), want_coords) and all(
                torch.equal(a, b) for a, b in zip(got_pairs, want_pairs, strict=True)
            )
            wrong += [] if same else [layer]
        problem = f"{', '.join(wrong)} differ from plain torch" if wrong else None
        detail = f"{', '.join(_KINDS)}: {count:,} pairs, all the same"
        yield verdict(f"maps, {title}", problem, detail, rows=rows, pairs=count)


def _can_multiply(setup: Setup, name: str) -> bool:
    target = setup.target
    if name == "tf32":
        return target is not None and target.has_tf32
    return target is None or (name != "fp64" and (name != "bf16" or target.has_bf16))


def product(built: KernelMap, device: torch.device, operands: list[torch.Tensor], tf32: bool) -> list[torch.Tensor]:
    """y, dx, dw, db of one layer."""
    x, weight, bias, dy = (tensor.to(device) for tensor in operands)
    x, weight, bias = (tensor.clone().requires_grad_() for tensor in (x, weight, bias))
    y = functional.conv(x, weight, bias, built, allow_tf32=tf32)
    return [y, *torch.autograd.grad(y, [x, weight, bias], dy)]


def products(setup: Setup) -> Iterator[Outcome]:
    """Forward, input gradient and weight gradient of every dtype against fp64."""
    coords = cloud(setup.rows(20_000, 5_000, 250))
    for name, (dtype, tf32) in _DTYPES.items():
        kernels = _can_multiply(setup, name)
        if name == "tf32" and not kernels:
            yield Outcome("products, tf32", SKIPPED, "this device has no TF32")
            continue
        limit, wrong = tolerances.of("product", name), []
        worst: dict[str, float] = {}
        for layer in ("submanifold", "strided", "inverse"):
            with plain_torch():
                reference = build(layer, coords)[1]
            with setup.in_force(kernels):
                built = build(layer, coords.to(setup.device))[1]
            for c_in, c_out in _CHANNELS:
                operands = _operands(reference, c_in, c_out, dtype)
                with plain_torch():
                    exact = [tensor.double() for tensor in operands]
                    want = product(reference, torch.device("cpu"), exact, False)
                with setup.in_force(kernels):
                    got = product(built, setup.device, operands, tf32)
                for part, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
                    largest, rms = error_of(a, b)
                    worst[part] = max(worst.get(part, 0.0), largest)
                    if largest > limit.largest or rms > limit.rms:
                        wrong.append(f"{part} of {layer} {c_in} -> {c_out} ({largest:.1e})")
        problem = f"beyond {limit.largest:.0e}: {', '.join(wrong)}" if wrong else None
        how = "kernels" if kernels and setup.target is not None else "plain torch"
        detail = f"{how}; largest errors " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
        yield verdict(f"products, {name}", problem, detail, limit=limit.largest, **worst)


def _operands(kmap: KernelMap, c_in: int, c_out: int, dtype: torch.dtype) -> list[torch.Tensor]:  # x, weight, bias, dy
    generator = torch.Generator().manual_seed(c_in)
    shapes = (kmap.n_in, c_in), (kmap.n_offsets, c_in, c_out), (c_out,), (kmap.n_out, c_out)
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    tensors[1] /= (kmap.n_offsets * c_in) ** 0.5
    tensors[3] /= max(1, kmap.n_out) ** 0.5  # gradients of weights stay within fp16
    return [tensor.to(dtype) for tensor in tensors]


def pools(setup: Setup) -> Iterator[Outcome]:
    """Local and global pools with gradients."""
    coords = cloud(setup.rows(20_000, 5_000, 250))
    with plain_torch():
        reference = build("strided", coords)[1]
    with setup.in_force():
        built = build("strided", coords.to(setup.device))[1]
    values = torch.randn(len(coords), 24, generator=torch.Generator().manual_seed(1))
    limit = tolerances.of("product", "fp32").largest
    for mode in ("max", "avg", "sum"):
        with plain_torch():
            want = _pool(reference, coords, values.double(), mode)
        with setup.in_force():
            got = _pool(built, coords.to(setup.device), values.to(setup.device), mode)
        worst = max(error_of(a, b)[0] for a, b in zip(got, want, strict=True))
        problem = f"largest error {worst:.1e}; allowed {limit:.0e}" if worst > limit else None
        yield verdict(f"pools, {mode}", problem, f"largest error {worst:.1e}", largest=worst)


def _pool(kmap: KernelMap, coords: torch.Tensor, values: torch.Tensor, mode: str) -> list[torch.Tensor]:
    x = values.clone().requires_grad_()
    y = functional.pool(x, kmap, mode)
    whole = functional.global_pool(x, coords[:, 0], 2, mode)
    (dx,) = torch.autograd.grad(y.square().sum() + whole.square().mean(), [x])
    return [y, whole, dx]
