"""The helper keeps nothing of a call, and lets go of what goes: references, cycles, forks, ends."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge.core.conv.history import histories
from tests.adapters.spconv import apis as spconv_apis
from tests.fake_driver import NOWHERE
from tests.native.recording import Recorder, anew, helper, in_threads, served, way
from tests.native.world import COORDS, World
from tests.walk_apis import pretended_gpu


@contextlib.contextmanager
def world():
    """A network that has been called often enough to be known, whose launches go nowhere."""
    with anew(), way("on"), spconv_apis.standin() as sp, torch.no_grad():
        made = World(sp, Recorder(), True)
        with pretended_gpu():
            for _ in range(4):
                made.net(made.x)
            yield made


def lasting(it):
    """What lives longer than a call, and is no constant of Python's."""
    found = [it.net, it.x, it.features, it.book, it.book.cache, *it.net.parameters()]
    found += [*it.net.buffers(), it.x.indice_dict, it.x.indice_dict["a"]]
    for layer in it.net.modules():
        held = histories.get(id(layer))
        if held is not None:
            history = held[1]
            found.append(history)
            for plan in filter(None, (history.plan, history.full_plan)):
                found += [plan, plan.native, plan.same, plan.vectors, plan.between, plan._plan]
                found += [plan.native and plan._plan.forward]
    found += it.book.cache.values()
    return found + [torch.float32, helper().Launcher]


def steady(run, it, times):
    """Nothing has more references, and there is no more memory, after so many calls."""
    for _ in range(50):
        run()
    gc.collect()
    objects, blocks = lasting(it), sys.getallocatedblocks()
    before, tracked = [sys.getrefcount(one) for one in objects], len(gc.get_objects())
    for _ in range(times):
        run()
    gc.collect()
    after = [sys.getrefcount(one) for one in objects]
    grown = [
        (type(one), was, now)
        for one, was, now in zip(objects, before, after, strict=True)
        if abs(now - was) > times / 100
    ]
    assert grown == []
    assert len(gc.get_objects()) - tracked < times / 20 + 50
    assert sys.getallocatedblocks() - blocks < times / 5 + 500


def accepting(it, stack):
    return lambda: it.net(it.x)


def refusing(it, stack):
    stack.enter_context(way("refused 2.0%, 1"))
    return lambda: it.net(it.x)


def refusing_all(it, stack):
    x = it.over(it.features)
    x.mine = 1  # which the helper does not know
    return lambda: it.net(x)


def odd(it, stack):
    """Calls that Python refuses as well."""
    wrong = it.over(it.features)
    wrong._features = torch.tensor(1.0)

    def run():
        with contextlib.suppress(Exception):
            it.net.conv1(wrong)

    return run


def failing(it, stack):
    """The driver refuses every other launch."""
    own, count = torch.Tensor.new_empty, [0]

    def new_empty(*args, **named):
        count[0] += 1
        if count[0] % 3 == 0:
            raise torch.OutOfMemoryError("full")
        return own(*args, **named)

    stack.callback(setattr, torch.Tensor, "new_empty", own)
    torch.Tensor.new_empty = new_empty

    def run():
        with contextlib.suppress(torch.OutOfMemoryError):
            it.net(it.x)

    return run


def parts(it, stack):
    """Results that nobody takes, and modules in another order."""
    net, x, other = it.net, it.x, it.features

    def run():
        net.conv1(x)
        y = net.norm3(net.conv3(x).features)
        net.relu(y + other)
        net.norm1(net.conv1(x).features)

    return run


CASES = [accepting, refusing, refusing_all, odd, failing, parts]


@pytest.mark.parametrize("times", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_calls_leave_nothing_behind(case, times):
    with world() as it, contextlib.ExitStack() as stack:
        steady(case(it, stack), it, times)


def test_launches_leave_nothing_behind():
    launch = helper().Launcher(NOWHERE, 0, 128, 0, "PlfxP", lambda: None)
    fails = helper().Launcher(NOWHERE, 1, 128, 0, "l")  # whose handle is the driver's code
    tensor, number, text = torch.zeros(3), 1 << 70, "text"
    objects = [launch, fails, tensor, number, text]
    given = [
        (launch, (1, 1, 1, 0, tensor, 2**40, 0.5, text, 2**63)),
        (launch, (1, 1, 1, 0, tensor, number, 0.5, text, 1)),
        (launch, (1, 1, 1, 0, text, 1, 0.5, text, 1)),
        (launch, (1, 1, 1, number, tensor, 1, 0.5, text, 1)),
        (launch, (1, 1, 1)),
        (fails, (1, 1, 1, 0, 1)),
    ]

    def run():
        for call, values in given:
            with contextlib.suppress(OverflowError, AttributeError, TypeError, RuntimeError):
                call(*values)

    run()
    before, blocks = [sys.getrefcount(one) for one in objects], sys.getallocatedblocks()
    for _ in range(20_000):
        run()
    assert [sys.getrefcount(one) for one in objects] == before
    assert sys.getallocatedblocks() - blocks < 200


def test_a_launcher_lets_go_of_what_it_holds():
    enter = type("Enter", (), {"__call__": lambda self: None})()
    gone = weakref.ref(enter)
    launch = helper().Launcher(NOWHERE, 0, 128, 0, "l", enter)
    del enter
    assert gone() is not None
    del launch
    assert gone() is None


def plans():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is helper().Known]


def test_plans_go_with_their_layers():
    before = len(plans())
    with world() as it:
        assert len(plans()) > before
        plan = histories[id(it.net.conv1)][1].plan
        # A circle: what a plan for the helper holds leads back to the plan.
        plan.native and plan._plan.forward._specs.__setitem__("back", plan)
        del plan
    del it
    assert len(plans()) == before


def test_maps_go_while_layers_stay():
    with world() as it:
        tiles = weakref.ref(it.book._tiles[0])
        it.x.indice_dict.clear()
        it.book = it.x = None
        gc.collect()
        assert tiles() is None
        assert plans(), "the layers are known still"


@pytest.mark.timed
def test_threads_share_a_network():
    """All launch what one launches alone."""
    with world() as it, served() as by_helper:
        want = it.net(it.x).features.shape

        def work(_):
            found = []
            with torch.no_grad():
                for step in range(60):
                    x = it.over(torch.randn(len(COORDS), 16))
                    found.append(it.net(x).features.shape)
                    if step % 7 == 0:  # launches are bound anew
                        it.book.cache._entries.clear()
            return found

        assert in_threads(4, work) == [[want] * 60] * 4
        assert by_helper["known_call"] > 100
