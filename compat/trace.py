"""What a model gives from stated weights and one scene: outputs, gradients, three training steps.

As a program it does so with the real library, in a process where nothing is bridged:

    python -m compat.trace TASKS.pt TRACES.pt
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import traceback
from typing import Any

import torch

from sparse_bridge.adapters import base

from .matrix import Model
from .scenes import Scene
from .subject import Subject

__all__ = ["STEPS", "Task", "trace"]

STEPS = 3


@dataclasses.dataclass
class Task:
    """What the native process has to repeat. model, scene: fields of those classes."""

    model: dict[str, Any]
    dtype: str
    scene: dict[str, Any]
    state: dict[str, torch.Tensor]

    def subject(self) -> Subject:
        scene = Scene(**self.scene)
        return Subject(Model(**self.model), "cpu", self.dtype, "small", lambda seed: scene)


def trace(subject: Subject, state: dict[str, torch.Tensor], tolerant: bool = False) -> dict[str, Any]:
    """Run the model from the weights `state`.

    Returns:
        "eval": outputs in eval mode; and for a model that trains "train": outputs in training
        mode, "gradients", "losses" of `STEPS` steps of SGD, "trained": outputs after them.
        "errors": by stage, why it did not run; empty unless `tolerant`.
    """
    found: dict[str, Any] = {"errors": {}}
    stages = (_training, _inference) if subject.model.train else (_inference,)
    for stage in stages:
        network = subject.network(seed=1)
        network.load_state_dict(state)
        try:
            found |= stage(subject, network)
        except Exception as error:
            if not tolerant:
                raise
            traceback.print_exc()
            found["errors"][stage.__name__.strip("_")] = f"{type(error).__name__}: {error}"
    return found


def _inference(subject: Subject, network: torch.nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        return {"eval": _stored(subject.outputs(subject.run(network.eval())))}


def _training(subject: Subject, network: torch.nn.Module) -> dict[str, Any]:
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        result = subject.run(network)
        loss = subject.loss(result)
        loss.backward()
        if step == 0:
            found["train"] = _stored(subject.outputs(result))
            found["gradients"] = subject.gradients(network)
        found["losses"].append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        found["trained"] = _stored(subject.outputs(subject.run(network)))
    return found


def _stored(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().clone() for one in outputs]


def _native(framework: str) -> None:
    """Import the real library, and let spconv's CPU build run backward."""
    importlib.import_module(base.load(framework).tensor[0])
    if framework == "spconv" and not torch.cuda.is_available():
        # Its CPU kernels ask for a CUDA stream in backward and never use it.
        for name, module in list(sys.modules.items()):
            if name.startswith("spconv") and "get_current_stream" in vars(module):
                vars(module)["get_current_stream"] = _no_stream


def _no_stream() -> int:
    return 0


def main(tasks_path: str, traces_path: str) -> None:
    """Read a list of tasks of one framework, write the list of their traces, natively."""
    # The wheel's CPU convolutions race with more threads.
    torch.set_num_threads(1)
    tasks: list[Task] = torch.load(tasks_path, weights_only=False)
    _native(tasks[0].model["framework"])
    with contextlib.redirect_stdout(sys.stderr):
        found = [trace(task.subject(), task.state, tolerant=True) for task in tasks]
    torch.save(found, traces_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
