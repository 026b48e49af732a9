"""One call of a module that makes its sparse tensor itself, until its result is known."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..closed_world.front import FrontAudit
from .calls.call import ReplayResult, other_inputs
from .calls.input_proxies import InputProxies
from .graphed_module import GraphedModule


class CallFrame:
    """The call. proxies: in a trial, of the inputs; reads and writes count from the resume point on.  front: watches
    what is in front of it, where that may have to run again."""

    def __init__(self, region: Any, args: Any, kwargs: Any, proxies: InputProxies | None = None) -> None:
        self.region, self.args, self.kwargs, self.proxies = region, args, kwargs, proxies
        self.dicts, self.parts = other_inputs(args, kwargs)
        self.initial = {path: dict(own) for path, own in self.dicts.items()}
        self.entered, self.records_gradients = False, torch.is_grad_enabled()
        self.result: ReplayResult | None = None
        self.watches = contextlib.ExitStack()  # what is entered at the resume point, until the call ends
        self.front: FrontAudit | None = None
        self._repeatable = False

    def watch_front(self, modes: Sequence[GraphedModule]) -> None:
        """Watch what the call does from here on to its resume point, if one of these may repeat it. The call's
        `watches` end it."""
        for mode in modes:
            compares = mode.trains and mode.latest is not None and mode.latest.comparison_ahead()
            key = next(iter(mode.kinds), None)
            if key is not None and (compares or (mode.rerun_due and mode.given_up() is None)):
                self.front = FrontAudit(mode.model, key.tensors)
                self.watches.enter_context(self.front)
                return

    def end_front(self) -> None:
        """The call has come to its resume point."""
        if self.front is not None:
            self.front.stop(sys._getframe(1))

    def repeatable(self) -> bool:
        """Whether what is in front of the resume point was watched, and may run again. Raises Refusal where it was,
        and may not."""
        front, self.front = self.front, None  # which keeps the model: graphs keep this call
        if front is not None:
            front.refuse_effects()
            self._repeatable = True
        return self._repeatable


class ShortCircuit(BaseException):
    """Leaves a forward whose result is known already."""

    def __init__(self, call_frame: CallFrame, value: Any) -> None:
        self.call_frame, self.value = call_frame, value
