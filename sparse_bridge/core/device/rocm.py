"""Faults of ROCm releases that give wrong numbers without an error, and what is done about them."""

from __future__ import annotations

import functools
import os

import torch

from ... import log, settings, state
from ...refusals import Why

# rocBLAS and hipBLASLt map the rows of a product to a grid axis that some GPUs (seen on gfx1201,
# ROCm 7.1 and 7.2, fp32 and fp64) limit to 65536 blocks; rows beyond are wrong. No release with the
# correction is known, and an extra launch per half a million rows costs next to nothing, so every
# ROCm release takes parts.
MOST_ROWS = 1 << 19
_WIDE = (torch.float32, torch.float64)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def multiplies() -> bool:
    """Whether AMD's libraries multiply matrices on GPUs, and not NVIDIA's."""
    return torch.version.hip is not None


def splits(x: torch.Tensor) -> bool:
    """Whether a product of x [N, K] has to be taken in parts of at most MOST_ROWS rows: of fp32 and fp64 on AMD's
    GPUs."""
    return torch.version.hip is not None and x.is_cuda and x.dtype in _WIDE and x.shape[0] > MOST_ROWS


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, K] @ w [K, M] + bias ([M], [1, M] or none), with gradients: [N, M]; one float dtype unless autocast is
    on, which is followed."""
    if not splits(x):
        return x @ w if bias is None else torch.addmm(bias, x, w)
    return torch.cat([linear(part, w, bias) for part in x.split(MOST_ROWS)])


def mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x [N, K] @ w [K, M] into `out` [N, M], which is returned; one float dtype, no gradients."""
    if not splits(x):
        return torch.mm(x, w, out=out)
    for part, rows in zip(x.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
        torch.mm(part, w, out=rows)
    return out


cpu_mm = torch.mm  # the same for tensors on the CPU, whose callers have many small ones


def replays_graphs() -> bool:
    """Whether captured graphs may be replayed: on ROCm only if the settings say "always".

    Replayed graphs give wrong data now and then there (ROCm 7.2 on MI300X; graphs of more than 200
    nodes on gfx1201). A trial when a graph is captured does not show it.
    """
    return torch.version.hip is None or settings.get().capture == "always"


def say_that_graphs_stay_off() -> None:
    """Log once why nothing is replayed on ROCm."""
    log.once(("rocm-graphs",), f"Graphs are not replayed: {Why.GRAPH_ROCM.says()}; {Why.GRAPH_ROCM.remedy}.")


def has_expandable_segments() -> bool:
    """Whether torch's allocator has them and may be told to use them: not here, see `allocator_warning`."""
    return torch.version.hip is None


def allocator_warning() -> str | None:
    """What to say about expandable segments, which have produced NaN, illegal addresses and hangs
    on ROCm; None where the environment does not ask for them."""
    if torch.version.hip is None:
        return None
    for name in _ALLOCATOR:
        options = os.environ.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in options:
            return (
                f"{name} turns on expandable_segments, which has produced NaN, illegal addresses "
                "and hangs on ROCm, with any package. Unset it if anything looks wrong."
            )
    return None


@functools.cache
def warn_about_allocator() -> None:
    """Log `allocator_warning` once."""
    warning = allocator_warning()
    if warning is not None:
        log.once(("expandable-segments",), warning, level=30)


@state.owns
def reset() -> None:
    """Look at the allocator again."""
    warn_about_allocator.cache_clear()
