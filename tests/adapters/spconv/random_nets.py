"""Random stacks of spconv layers on random sites, to compare two ways of running them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CHANNELS = (1, 2, 3, 5, 8, 16, 17)
KINDS = ("subm", "conv", "conv", "transpose", "pool", "inverse", "inverse", "dense layer")


@dataclasses.dataclass
class Net:
    """A stack of layers with its input."""

    text: str
    layers: nn.ModuleList
    features: torch.Tensor
    indices: torch.Tensor
    shape: list[int]
    batch_size: int


@dataclasses.dataclass
class Run:
    """What came out: rows, sites, gradients by name, or the exception and the layer that raised."""

    features: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    shape: list[int] | None = None
    keys: list[Any] | None = None
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    error: BaseException | None = None
    at: int = -1


def _sites(rng: random.Random, shape: list[int], batch_size: int, duplicates: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    cells = batch_size
    for extent in shape:
        cells *= extent
    count = rng.choice([1, 2, min(cells, 7), max(1, cells // 6), max(1, cells // 3)])
    count = min(count, 250)
    flat = torch.randperm(cells, generator=generator)[:count]
    rows = torch.stack(torch.unravel_index(flat, (batch_size, *shape)), 1).int()
    if duplicates:
        rows = rows[torch.randint(0, count, (count + 3,), generator=generator)]
    if rng.random() < 0.15:  # dead rows
        rows[torch.rand(len(rows), generator=generator) < 0.3, 0] = -1
    return rows.contiguous()


def _per_axis(rng: random.Random, dims: int, choices: tuple[int, ...]) -> int | list[int]:
    if rng.random() < 0.5:
        return rng.choice(choices)
    return [rng.choice(choices) for _ in range(dims)]


def make(sp: Any, seed: int, dtype: torch.dtype = torch.float32) -> Net:
    """Net number `seed`, built of the classes of `sp` (a `spconv.pytorch`)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.choice([1, 2, 2, 3, 3, 3, 4])
    largest = {1: 60, 2: 17, 3: 9, 4: 5}[dims]
    shape = [rng.randint(3, largest) for _ in range(dims)]
    batch_size = rng.choice([1, 1, 2, 3])
    channels = rng.choice(CHANNELS)
    depth = rng.choice([1, 1, 2, 3, 4])
    kinds = [rng.choice(KINDS) for _ in range(depth)]
    duplicates = rng.random() < 0.15 and "subm" not in kinds
    indices = _sites(rng, shape, batch_size, duplicates)
    features = torch.randn(len(indices), channels, dtype=dtype)
    layers, lines, made, grid = nn.ModuleList(), [], [], list(shape)
    saved: dict[Any, list[int]] = {}
    for kind in kinds:
        for _ in range(20):
            trial = list(made)
            layer, after = _layer(sp, rng, kind, dims, channels, trial)
            size = _size_after(layer, grid, saved)
            if min(size) > 0:  # at exactly 0 spconv goes on with rows that have no place
                break
        else:
            layer, after, size, trial = nn.Tanh(), channels, grid, made
        if len(trial) > len(made):
            saved[layer.indice_key] = grid
        channels, made, grid = after, trial, size
        lines.append(repr(layer) + f" key={getattr(layer, 'indice_key', None)}")
        layers.append(layer.to(dtype))
    text = f"seed {seed}: {shape} x {batch_size}, {len(indices)} rows\n" + "\n".join(lines)
    return Net(text, layers, features, indices, shape, batch_size)


def _size_after(layer: nn.Module, grid: list[int], saved: dict[Any, list[int]]) -> list[int]:
    if getattr(layer, "inverse", False) and not layer.conv1x1:
        return saved.get(layer.indice_key, grid)
    if getattr(layer, "subm", True) or getattr(layer, "inverse", False):
        return grid
    sizes = zip(grid, layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
    if getattr(layer, "transposed", False):
        return [(n - 1) * s - 2 * p + k for n, k, s, p, _ in sizes]
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]


def _layer(sp: Any, rng: random.Random, kind: str, dims: int, channels: int, made: list[Any]) -> tuple[nn.Module, int]:
    """A layer and its output channels. made: (key, kernel size) of layers that can be inverted."""
    after, bias = rng.choice(CHANNELS), rng.random() < 0.6
    key = rng.choice([None, "key", f"key{len(made)}", f"key{rng.randrange(1 << 20)}"])
    cls, native = f"{dims}d", {"algo": sp.ConvAlgo.Native}  # the one that spconv has on the CPU
    if kind == "inverse" and not made and rng.random() < 0.9:
        kind = "conv"
    if kind == "dense layer":
        options = [nn.Tanh(), nn.Linear(channels, after), nn.LayerNorm(channels)][: 3 if channels > 1 else 2]
        layer = rng.choice(options)
        return layer, after if isinstance(layer, nn.Linear) else channels
    if kind == "subm":
        sizes = (1, 3, 3, 5) if dims < 4 else (1, 3)
        kernel, dilation = _per_axis(rng, dims, sizes), rng.choice([1, 1, 1, 2, 3])
        stride, padding = rng.choice([1, 1, 2]), rng.choice([0, 1])
        return getattr(sp, "SubMConv" + cls)(
            channels, after, kernel, stride, padding, dilation, bias=bias, indice_key=key, **native
        ), after
    if kind == "inverse":
        wanted, kernel = rng.choice(made) if made else ("missing", 3)
        if rng.random() < 0.08:
            kernel = 2
        return getattr(sp, "SparseInverseConv" + cls)(channels, after, kernel, wanted, bias=bias, **native), after
    kernel = _per_axis(rng, dims, (1, 2, 3, 3, 4) if dims < 4 else (1, 2, 3))
    stride, padding = _per_axis(rng, dims, (1, 2, 2, 3)), _per_axis(rng, dims, (0, 0, 1, 2))
    dilation = _per_axis(rng, dims, (1, 1, 1, 2, 3))
    if kind == "pool":
        layer = getattr(sp, "SparseMaxPool" + cls)(
            kernel, rng.choice([None, stride]), padding, dilation, indice_key=key, **native
        )
        after = channels
    else:
        name = "SparseConv" if kind == "conv" else "SparseConvTranspose"
        unit = torch.tensor(kernel).prod() == 1 and torch.tensor(stride).prod() == 1
        layer = getattr(sp, name + cls)(
            channels, after, kernel, stride, 0 if unit else padding, dilation, bias=bias, indice_key=key, **native
        )
    if key is not None:
        made.append((key, kernel))
    return layer, after


def run(sp: Any, net: Net) -> Run:
    """Forward and backward, with a seeded gradient of the output."""
    net.layers.zero_grad()
    leaf = net.features.clone().requires_grad_()
    result = Run()
    x = sp.SparseConvTensor(leaf, net.indices.clone(), list(net.shape), net.batch_size)
    try:
        for result.at, layer in enumerate(net.layers):
            if type(layer).__module__.startswith("torch.nn"):
                x = x.replace_feature(layer(x.features))
            else:
                x = layer(x)
    except Exception as error:
        result.error = error
        return result
    result.features, result.indices = x.features.detach(), x.indices.clone()
    result.shape, result.keys = list(x.spatial_shape), sorted(x.indice_dict)
    if not len(x.features):
        return result
    generator = torch.Generator().manual_seed(7)
    order = lexicographic(x.indices)
    gradient = torch.empty_like(x.features)
    gradient[order] = torch.randn(x.features.shape, generator=generator, dtype=x.features.dtype)
    x.features.backward(gradient)
    result.gradients["input"] = leaf.grad
    for name, parameter in net.layers.named_parameters():
        if parameter.grad is not None:
            result.gradients[name] = parameter.grad.clone()
    return result


def exact(sp: Any, net: Net) -> Run:
    """`run` in fp64."""
    return run(sp, dataclasses.replace(net, layers=copy.deepcopy(net.layers).double(), features=net.features.double()))


def lexicographic(indices: torch.Tensor) -> torch.Tensor:
    order = torch.arange(len(indices))
    for column in reversed(range(indices.shape[1])):
        order = order[torch.sort(indices[order, column], stable=True).indices]
    return order


def difference(got: Run, want: Run, exact: Callable[[], Run]) -> str | None:
    """What differs between two runs of one net; None when nothing does.

    exact: the answer in fp64. Where the net is ill-conditioned, so that `want` itself is far from it, `got`
        may be as far.
    spconv (`want`) refuses regular layers on no rows; nothing is compared there.
    """
    if want.error is not None and "must not empty" in str(want.error):
        return None
    if want.error is not None or got.error is not None:
        if want.error is None or got.error is None or got.at != want.at:
            return f"raised {got.error!r} at {got.at} instead of {want.error!r} at {want.at}"
        if not isinstance(got.error, type(want.error)):
            return f"raised {got.error!r} instead of {want.error!r}"
        return None
    if got.shape != want.shape or got.keys != want.keys:
        return f"shape {got.shape}, keys {got.keys} instead of {want.shape}, {want.keys}"
    mine, theirs = lexicographic(got.indices), lexicographic(want.indices)
    if not torch.equal(got.indices[mine], want.indices[theirs]):
        return f"sites differ: {len(mine)} instead of {len(theirs)} rows"
    ours, native = _values(got), _values(want)
    if set(ours) != set(native):
        return f"{sorted(ours)} instead of {sorted(native)}"
    in_fp64 = functools.cache(lambda: _values(exact()))
    for name, value in native.items():
        worst = _error(ours[name], value)
        if worst > 1e-4 and _error(ours[name], in_fp64()[name]) > 2 * _error(value, in_fp64()[name]):
            return f"{name} differs by {worst:.1e}"
    return None


def _values(made: Run) -> dict[str, torch.Tensor]:
    """What a run computed, by name; rows of the output in the order of their sites."""
    return {"output": made.features[lexicographic(made.indices)]} | {
        f"gradient of {name}": gradient for name, gradient in made.gradients.items()
    }


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error relative to the root mean square plus the entry itself."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    scale = want.double().pow(2).mean().sqrt().clamp(min=1e-6)
    return ((got - want).abs() / (scale + want.abs())).max().item()
