"""Comparing tensors: largest and root-mean-square error, relative to the reference's own RMS."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import tolerances
from sparse_bridge.errors import SparseBridgeError


def assert_close(got, want, dtype=torch.float32, what="result"):
    """Every element finite and within the dtype's tolerance of the fp64 reference `want`."""
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if want.numel() == 0:
        return
    bad = ~torch.isfinite(got)
    assert not bad.any(), f"{what}: {int(bad.sum())} elements are not finite, first at {bad.nonzero()[0].tolist()}"
    scale = want.pow(2).mean().sqrt().clamp(min=1e-12)
    error = (got - want).abs() / scale
    largest, rms = error.max().item(), error.pow(2).mean().sqrt().item()
    limit_max, limit_rms = tolerances.of("product", dtype)
    place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    assert largest <= limit_max and rms <= limit_rms, (
        f"{what}: max error {largest:.2e} (limit {limit_max:.0e}) at {place}, RMS {rms:.2e} (limit {limit_rms:.0e})"
    )


def rows_of(coords):
    """Coordinates as a set of tuples."""
    return {tuple(row) for row in coords.tolist()}


def assert_error(call, error, words):
    """`call` raises exactly `error`, one of ours, and the message holds all of `words`."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and issubclass(error, SparseBridgeError)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


class NothingComputed(TorchDispatchMode):
    """No operation may be called inside of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is called where nothing may be computed")
