"""What is counted as held is held: autograd's thread of a device has let go of what it returned."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from tests.robustness.watch import collect

ROOT = pathlib.Path(__file__).parents[2]
DEVICE, ROUNDS = "pretended", 12
# A device in Python, for which autograd has a thread as for a GPU; new in torch 2.11.
_pretend = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)


class OnDevice(torch.Tensor):
    """A tensor on the pretended device whose values are those of `here`, on the CPU."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(cls, here.shape, dtype=here.dtype, device=torch.device(DEVICE, 0))
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: one.here if isinstance(one, cls) else one, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, func(*args, **kwargs))


class Sum(torch.autograd.Function):
    """A sum, whose backward pass has autograd's thread wait for whoever else wants the CPU from then on."""

    @staticmethod
    def forward(ctx: Any, *parts: OnDevice) -> OnDevice:
        ctx.count = len(parts)
        return OnDevice(torch.stack([part.here for part in parts]).sum())

    @staticmethod
    def backward(ctx: Any, dy: OnDevice) -> tuple[OnDevice, ...]:
        assert threading.current_thread() is not threading.main_thread()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        return tuple(OnDevice(dy.here.clone()) for _ in range(ctx.count))


def held_after(settle: Callable[[], object]) -> int:
    """In how many of `ROUNDS` gradients that nobody has live on, in spite of `settle()`."""
    leaves, held = [OnDevice(torch.ones(())).requires_grad_() for _ in range(200)], 0
    for _ in range(ROUNDS):
        grads = torch.autograd.grad(Sum.apply(*leaves), leaves)
        alive = [weakref.ref(grad.here) for grad in grads]
        del grads
        settle()
        held += any(one() is not None for one in alive)
    return held


def main() -> None:
    """Prints in how many rounds gradients are held after a collection, and after `collect`."""
    _pretend(DEVICE)
    library = torch.library.Library("aten", "IMPL")
    library.impl("ones", lambda size, **others: OnDevice(torch.ones(size)), "PrivateUse1")
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # of the thread of the device, too, which comes later
    gc.freeze()  # as in a suite: collections are short
    print(held_after(gc.collect), held_after(lambda: collect(DEVICE)))


@pytest.mark.skipif(_pretend is None, reason="this torch has no devices in Python")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads have no priorities of their own here")
def test_collecting_waits_for_the_thread_of_a_device():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.robustness.test_watch"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(int, done.stdout.split())
    assert before, "the thread let go at once in every round: this shows nothing"
    assert not after, f"gradients are held in {after} of {ROUNDS} rounds"


if __name__ == "__main__":
    main()
