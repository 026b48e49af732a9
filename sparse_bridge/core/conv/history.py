"""Calls of a layer whose launch may come later, and what followed its results, as far as the
epilogue of its convolution can apply it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..maps.kernel_map import KernelMap
from .epilogue import Epilogue, Norm
from .plan import ConvForm, run

STEPS = "nsa"  # norm, sum, activation: as an epilogue applies them
_TRIALS = 3  # calls after which a layer that nothing follows is left alone


class History:
    """What followed the results of one layer.

    seen: the steps behind the last result so far.  most: how many of them may be waited for;
    behind those somebody else reads, too.  alone: calls that nothing followed.  over: nothing is
    to be waited for any more.  norm: the last one that fitted, of results of `kind`.
    """

    __slots__ = ("alone", "kind", "most", "norm", "over", "seen")

    def __init__(self) -> None:
        self.norm: Norm | None = None
        self.kind: Any = None
        self.seen, self.most, self.alone, self.over = "", len(STEPS), 0, False

    def begin(self, done: str) -> str:
        """The steps that the next result waits for, of which `done` are part of the call; "" to
        find out."""
        seen, self.seen = self.seen[: self.most], done
        if seen.startswith(done) and len(seen) > len(done):
            self.alone = 0
            return seen
        self.alone += 1
        self.over = self.alone > _TRIALS
        return ""

    def read(self, steps: str) -> None:
        """Somebody reads what `steps` made, which is followed."""
        if len(steps) < self.most:
            self.most, self.over = len(steps), not steps


NOTHING = History()  # of layers that are not to wait
NOTHING.over = True

_histories: dict[int, tuple[weakref.ref[Any], History]] = {}


def history_of(owner: Any) -> History:
    """Of a layer or its weight, as long as that lives."""
    key = id(owner)
    found = _histories.get(key)
    if found is not None and found[0]() is owner:
        return found[1]
    made = History()

    def forget(gone: weakref.ref[Any]) -> None:
        held = _histories.get(key)
        if held is not None and held[0] is gone:
            del _histories[key]

    _histories[key] = weakref.ref(owner, forget), made
    return made


class LayerCall:
    """What all steps behind one call of a layer share."""

    __slots__ = ("device", "dtype", "given", "history", "shape", "stream", "target")

    def __init__(
        self, given: tuple[torch.Tensor, torch.Tensor, KernelMap, ConvForm],
        shape: tuple[int, int], history: History, target: str,
    ) -> None:  # fmt: skip
        self.given, self.shape, self.history, self.target = given, shape, history, target
        x = given[0]
        self.dtype, self.device, self.stream = x.dtype, x.device, -1
        if x.is_cuda:
            self.stream = torch._C._cuda_getCurrentRawStream(self.device.index)

    def here(self) -> bool:
        """Whether the stream of the call is the current one."""
        stream = self.stream
        return stream < 0 or torch._C._cuda_getCurrentRawStream(self.device.index) == stream

    def run(self, epilogue: Epilogue) -> torch.Tensor:
        """Launch it."""
        x, weight, kmap, form = self.given
        if not self.here():  # the layer's own stream, for which this one waits
            there = torch.cuda.ExternalStream(self.stream, x.device)
            with torch.cuda.stream(there):
                y = self.run(epilogue)
            torch.cuda.current_stream(x.device).wait_stream(there)
            return y
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return run(x, weight, kmap, epilogue, form)[0]
        return run(x, weight, kmap, epilogue, form)[0]
