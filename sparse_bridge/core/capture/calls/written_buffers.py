"""What a trial in inference leaves in the buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ....refusals import Refusal, Why
from ..graph_capture import copies_of, copy_each


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of its buffers, by name."""
    named = dict(model.named_buffers())
    return dict(zip(named, copies_of([buffer.data for buffer in named.values()]), strict=True))


_ROUNDING = 1e-4  # of the largest value


class WrittenBuffers:
    """A context of a trial, which begins at the model's sparse tensor: buffers have the values from before the call.

    before: those, by name."""

    def __init__(self, model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
        self._names = [name for name, _ in model.named_buffers()]
        self._buffers = [buffer.data for buffer in model.buffers()]
        self._before = [before.get(name, buffer) for name, buffer in zip(self._names, self._buffers, strict=True)]
        self._expected = copies_of(self._buffers)  # what the layers have left

    def __enter__(self) -> None:
        copy_each(self._buffers, self._before)

    def __exit__(self, *error: object) -> None:
        self._found = copies_of(self._buffers)

    def verify(self) -> None:
        """Raise Refusal where the trial has left something else than the layers."""
        for name, expected, found in zip(self._names, self._expected, self._found, strict=True):
            if not _alike(expected, found):
                raise Refusal(Why.GRAPH_BUFFER, name)


def _alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if torch.equal(expected, found) or not expected.numel():
        return True
    if not expected.is_floating_point():
        return False
    scale = float(expected.abs().max().nan_to_num())
    return torch.allclose(expected.double(), found.double(), rtol=0.0, atol=_ROUNDING * scale, equal_nan=True)
