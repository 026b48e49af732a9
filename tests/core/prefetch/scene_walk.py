"""The host's walk of a scene of a new shape: `python -m tests.core.prefetch.scene_walk`.

Networks of `map_time` run over a stream of scenes on a GPU that is not there. Of a late scene is
counted: Python frames of this package; those of torch and Python's own library; calls of functions
in C. In inference and in training, both passes; with the compiled helper and without.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from sparse_bridge import native, state
from sparse_bridge.native import calls as native_calls
from tests.rules import layers_deferred, products_unmade, row_kernels_on, ruled

from .map_time import networks, streamed

_SCENES, _COUNTED = 14, 16  # timed by `streamed`; the forward pass that is counted


class Steps(NamedTuple):
    """frames: of this package.  others: of torch and the standard library.  calls: of C."""

    frames: int
    others: int
    calls: int


class _Counter:
    def __init__(self) -> None:
        self.own = self.others = self.calls = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "c_call":
            self.calls += 1
        elif event == "call":
            name = frame.f_code.co_filename
            if "/sparse_bridge/" in name:
                self.own += 1
            elif "/tests/" not in name and not name.endswith("mock.py"):
                self.others += 1

    def steps(self) -> Steps:
        return Steps(self.own, self.others, self.calls)


def _counting(own: Callable[..., Any], counter: _Counter, train: bool) -> Callable[..., Any]:
    """A network's forward whose call number `_COUNTED` is counted.  train: with all until the next call."""
    passes = [0]

    def forward(*args: Any) -> Any:
        passes[0] += 1
        if passes[0] != _COUNTED:
            sys.setprofile(None)
            return own(*args)
        sys.setprofile(counter)
        try:
            return own(*args)
        finally:
            if not train:
                sys.setprofile(None)

    return forward


@contextlib.contextmanager
def _helper(used: bool) -> Iterator[None]:
    """With the compiled helper's functions for calls of layers, or without."""
    absent = dict.fromkeys(() if native.module() and used else native_calls.FUNCTIONS)
    with ruled(native_calls, **absent):
        yield


def walks(helper: bool, train: bool = False, only: str | None = None) -> Iterator[tuple[str, Steps]]:
    """(framework and network, a scene's steps).  helper: the compiled one is used, where it is.  train: both passes.
    only: this network."""
    state.reset()  # what other tests of this process have launched is known as theirs
    for name, net, scene in networks():
        if only not in (None, name):
            continue
        counter = _Counter()
        with (
            _helper(helper),
            mock.patch.object(type(net), "forward", _counting(type(net).forward, counter, train)),
            layers_deferred(),
            row_kernels_on("cpu"),
            products_unmade(),
        ):
            streamed(net, scene, _SCENES, train)
        yield name, counter.steps()


def main() -> None:
    for train, helper in itertools.product((False, True), (False, True)):
        for name, steps in walks(helper, train):
            print(f"{'training' if train else 'inference'}, {'helper' if helper else 'Python'}: {name}: {steps}")


if __name__ == "__main__":
    main()
