"""Calls of operators from Python go past the dispatcher only where it would do nothing."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_bridge.compile  # noqa: F401
from sparse_bridge.core.compile import library

ops = torch.ops.sparse_bridge


@pytest.fixture(scope="module")
def scale():
    """An operator, and where its calls arrived: "direct" or in the dispatcher."""
    seen = []

    def run(x, other, factor):
        return x * factor

    library.define(
        "test_scale",
        "(Tensor x, Tensor? other, float factor) -> Tensor",
        run,
        lambda x, other, factor: torch.empty_like(x),
    )
    library.differentiate(
        "test_scale",
        lambda ctx, inputs, output: setattr(ctx, "factor", inputs[2]),
        lambda ctx, dy: (dy * ctx.factor, None, None),
    )
    library.operator_names.remove("test_scale")
    operator, dispatched = ops.test_scale.default, None
    entered = torch._dynamo.eval_frame.innermost_fn(operator._op)
    for cell in entered.__closure__[0].cell_contents.__closure__:
        if isinstance(cell.cell_contents, type(ops.conv._op)):
            dispatched = cell

    own = dispatched.cell_contents

    def watched(*args, **more):
        seen.append(args)
        return own(*args, **more)

    dispatched.cell_contents = watched
    return operator, seen


def test_plain_calls_are_direct(scale):
    operator, seen = scale
    x, learns = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    seen.clear()
    assert torch.equal(operator(x, None, 2.0), 2 * x)
    with torch.no_grad():
        operator(learns, x, 2.0)
    with torch.inference_mode():
        operator(torch.ones(3), x, 2.0)
    assert not seen


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_watched_calls_are_dispatched(scale):
    operator, seen = scale
    x, learns = torch.ones(3), torch.ones(3, requires_grad=True)

    def dispatched(*args, **more):
        before = len(seen)
        y = operator(*args, **more)
        assert len(seen) == before + 1
        return y

    (dx,) = torch.autograd.grad(dispatched(learns, None, 2.0).sum(), learns)
    assert torch.equal(dx, 2 * x)
    dispatched(x, learns, 2.0)
    dispatched(x, None, factor=2.0)
    assert dispatched(torch.ones(3, device="meta"), None, 2.0).is_meta
    for mode in (Mode, Functions):
        with mode():
            dispatched(x, None, 2.0)
    with torch.profiler.profile() as profile:
        dispatched(x, None, 2.0)
    assert any("test_scale" in event.key for event in profile.key_averages())
    traced = torch.jit.trace(lambda x: dispatched(x, None, 2.0), x, check_trace=False)
    assert "test_scale" in str(traced.graph)
    with pytest.raises(RuntimeError):
        operator(x)


def test_operators_of_lists_are_left_alone():
    assert isinstance(ops.minkowski_union.default._op, type(ops.conv._op))
