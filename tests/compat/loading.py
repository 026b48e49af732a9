"""Models of the matrix on a stand-in, imported anew, since they bind its classes at import."""

from __future__ import annotations

import contextlib
import importlib
import sys
from unittest import mock

import torch

import sparse_bridge
from sparse_bridge import settings
from tests.adapters.spconv.apis import without_wheel


@contextlib.contextmanager
def models(framework, profile=None):
    """Gives `load(name)`: the module of a model, or the framework's own for the name "" ."""
    sparse_bridge.disable()
    with (
        without_wheel(),  # a stand-in is refused where an earlier test imported the real one
        settings.override(torchsparse_profile="auto"),
        sparse_bridge.enable(framework, mode="standin", profile=profile),
        imported_anew(framework) as load,
    ):
        yield load


@contextlib.contextmanager
def imported_anew(framework):
    """`load` of `models`, over the framework that is imported. What models assign in spconv is over with them: its
    constants, as OpenPCDet's do, and how its modules are loaded, as mmdetection3d's do."""
    folder = f"compat.models.{framework}"
    _forget(folder)
    try:
        with contextlib.ExitStack() as stack:
            if framework == "spconv":
                stack.enter_context(mock.patch.dict(vars(importlib.import_module("spconv.constants"))))
                module = importlib.import_module("spconv.pytorch").SparseModule
                for name in ("_version", "_load_from_state_dict"):
                    stack.enter_context(mock.patch.object(module, name, getattr(module, name)))
            yield lambda name: importlib.import_module(f"{folder}.{name}")
    finally:
        _forget(folder)


def _forget(folder):
    for name in [name for name in sys.modules if name.startswith(f"{folder}.")]:
        del sys.modules[name]


def shapes(build, **options):
    """{name: shape} of a network's state, without computing anything."""
    with torch.device("meta"):
        network = build(**options)
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def count(state):
    """Millions of learned numbers in `shapes`, rounded to two places."""
    learned = {n: s for n, s in state.items() if "running" not in n and "num_batches" not in n}
    return round(sum(torch.Size(shape).numel() for shape in learned.values()) / 1e6, 2)


def copy_weights(source, target, rename=lambda name: name):
    """Load the state of one network into another whose names differ; returns the second."""
    state = {rename(name): value for name, value in source.state_dict().items()}
    target.load_state_dict(state, strict=True)
    return target


def stir(network, seed=0):
    """Norms that do something: random scales, shifts and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if value.ndim == 1 and value.is_floating_point() and "mask" not in name:
            value.copy_(torch.rand(value.shape, generator=generator).to(value) + 0.5)
    return network
