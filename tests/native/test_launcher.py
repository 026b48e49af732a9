"""Launches of the compiled helper: what arrives at the driver, and what does not."""

from __future__ import annotations

import struct
import threading
import time

import numpy as np
import pytest
import torch

from tests.fake_driver import NOWHERE, Driver
from tests.native.recording import helper, in_threads, values_of
from tests.patience import PATIENCE


class Arriving:
    """A launcher of values of some kinds, and what arrived."""

    def __init__(self, kinds, code=0, entered=None):
        self.kinds, self.launches, self.code = kinds, [], code
        self.driver = Driver(self._seen)
        more = () if entered is None else (entered,)
        self.launch = helper().Launcher(self.driver.address, 77, 128, 640, kinds, *more)

    def _seen(self, launch):
        self.launches.append((launch, values_of(launch, self.kinds)))
        return self.code() if callable(self.code) else self.code

    def __call__(self, *values, grid=(1, 2, 3), stream=9):
        """The values as they lie in memory."""
        assert self.launch(*grid, stream, *values) is None
        return self.launches[-1][1]


def test_all_that_a_launch_says():
    it = Arriving("")
    it(grid=(2**32 - 1, 2**16, 5), stream=2**64 - 1)
    launch = it.launches[0][0]
    assert launch[:5] == (77, (2**32 - 1, 2**16, 5), 128, 640, 2**64 - 1)


WHOLE = {"b": 8, "h": 16, "i": 32, "l": 64}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers(kind):
    bits, it = WHOLE[kind], Arriving(kind)
    least, end = -(1 << (bits - 1)), 1 << (bits - 1)
    for value in (0, 1, -1, 5, end - 1, least, True, False):
        assert it(value) == [int(value)]
    for value in (end, 2 * end - 1):  # as an unsigned number
        assert it(value) == [value - 2 * end]
    for number in (np.int64(-7), np.int8(-7), np.uint8(7), torch.tensor(-7)):
        assert it(number) == [int(number)]
    before = len(it.launches)
    for value in (2 * end, least - 1, 1 << 200, -(1 << 200)):
        with pytest.raises(OverflowError):
            it(value)
    for value in (1.0, None, "1", torch.ones(2, dtype=torch.int64)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            it(value)
    assert len(it.launches) == before, "nothing was launched"


@pytest.mark.parametrize("kind, code", [("f", "<f"), ("d", "<d")])
def test_floats(kind, code):
    it = Arriving(kind)
    for value in (0.0, -0.0, 1e-3, -2.5, 1e38, float("inf"), 3, True, np.float32(0.1), np.int64(4)):
        assert struct.pack("<d", it(value)[0]) == struct.pack(
            "<d", struct.unpack(code, struct.pack(code, float(value)))[0]
        )
    assert np.isnan(it(float("nan"))[0])
    with pytest.raises(TypeError):
        it("1")
    with pytest.raises(OverflowError):
        it(1 << 2000)


def test_addresses():
    tensor, it = torch.zeros(3), Arriving("PPP")
    assert it(tensor, tensor.data_ptr() + 4, 0) == [tensor.data_ptr(), tensor.data_ptr() + 4, 0]
    assert it(2**64 - 1, True, torch.empty(0)) == [2**64 - 1, 1, 0]
    view = tensor[1:]
    assert it(view, torch.nn.Parameter(view), 7)[:2] == [view.data_ptr()] * 2

    class Odd:
        def __init__(self, answer):
            self.data_ptr = lambda: answer

    before = len(it.launches)
    for value in (-1, 2**64, None, "at", 1.5, Odd(-1), Odd("there"), Odd(None)):
        with pytest.raises((OverflowError, TypeError, AttributeError)):
            it(value, 0, 0)
    assert len(it.launches) == before


def test_many_kinds_at_once():
    it = Arriving("PxilxbhfdxP")
    values = (2**63, object(), -1, 2**63 - 1, None, -128, 2**15 - 1, 0.5, -0.25, "constant", 16)
    assert it(*values) == [2**63, -1, 2**63 - 1, -128, 2**15 - 1, 0.5, -0.25, 16]
    assert it.launches[0][0].parameters, "constants have no memory"


def test_as_many_values_as_there_may_be():
    it = Arriving("l" * 64)
    assert it(*range(64)) == list(range(64))
    for kinds in ("l" * 65, "q", "l P", "l\0", "ü"):
        with pytest.raises((ValueError, TypeError)):
            helper().Launcher(NOWHERE, 0, 128, 0, kinds)


def test_another_number_of_values():
    it = Arriving("ll")
    for given in ((), (1,), (1, 2, 3), tuple(range(90))):
        with pytest.raises(TypeError, match=f"a launch of {len(given)} values; expected 2"):
            it(*given)
    with pytest.raises(TypeError):
        it.launch()
    with pytest.raises(TypeError):
        it.launch(1, 1, 1, 0, 1, b=2)
    assert not it.launches


def test_grids():
    it = Arriving("")
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        it.launch(*grid, 0)
    for grid in ((2**32, 1, 1), (1, 2**40, 1), (1, 1, 2**70), (-1, 1, 1)):
        with pytest.raises(OverflowError):
            it.launch(*grid, 0)
    for stream in (-1, 2**64):
        with pytest.raises(OverflowError):
            it.launch(1, 1, 1, stream)
    with pytest.raises(TypeError):
        it.launch(1.0, 1, 1, 0)
    assert not it.launches


def test_the_drivers_errors():
    it = Arriving("l", code=719)
    with pytest.raises(RuntimeError, match="refused a launch: error 719"):
        it(1)
    it.code = 0
    it(2)
    assert [values for _, values in it.launches] == [[1], [2]]


def test_a_thread_without_a_context():
    codes, entered = [201, 0], []
    it = Arriving("l", lambda: codes.pop(0), lambda: entered.append(1))
    it(5)
    assert [values for _, values in it.launches] == [[5], [5]] and entered == [1]
    codes[:] = [201, 201]
    with pytest.raises(RuntimeError, match="error 201"):  # once is enough
        it(6)
    codes[:] = [201]
    alone = Arriving("l", lambda: codes.pop(0))
    with pytest.raises(RuntimeError, match="error 201"):
        alone(7)

    def fails():
        raise KeyError("no context")

    codes[:] = [201]
    it = Arriving("l", lambda: codes.pop(0), fails)
    with pytest.raises(KeyError, match="no context"):
        it(8)


def test_a_context_is_the_current_gpus(monkeypatch):
    from sparse_bridge.kernels.runtime import native_launch

    asked = []

    class Cuda:
        def cuDeviceGet(self, device, index):
            asked.append(("device", index))
            device._obj.value = 40 + index

        def cuDevicePrimaryCtxRetain(self, context, device):
            asked.append(("context", device.value))
            context._obj.value = 1 << 40

        def cuCtxSetCurrent(self, context):
            asked.append(("current", context.value))

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    native_launch.enter_context(Cuda())
    assert asked == [("device", 2), ("context", 42), ("current", 1 << 40)]


def test_others_run_while_the_driver_works():
    running, done = threading.Event(), []

    def code():
        running.set()
        for _ in range(1000):  # Python goes on in the other thread, or this waits in vain
            if done:
                return 0
            time.sleep(0.005)
        return 1

    def other():
        running.wait(PATIENCE)
        done.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    Arriving("", code)()
    thread.join()


def test_the_lock_is_given_away():
    import ctypes

    # A function of C that takes its time, for a kernel whose handle is the microseconds.
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    launch = helper().Launcher(sleep, 300_000, 128, 0, "")
    counted, end = [0], threading.Event()

    def count():
        while not end.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.01)
    before = counted[0]
    launch(1, 1, 1, 0)
    assert counted[0] - before > 1000
    end.set()
    thread.join()


def test_threads_that_launch_at_once():
    it = Arriving("lll")
    in_threads(6, lambda number: [it.launch(1, 1, 1, 0, number, step, number * step) for step in range(200)])
    found = sorted(tuple(values) for _, values in it.launches)
    assert found == sorted((n, step, n * step) for n in range(6) for step in range(200))


def test_what_is_no_launcher():
    made = helper()
    for wrong in ((), (1, 2, 3), ("a", 0, 128, 0, ""), (NOWHERE, 0, 128, 0, 5)):
        with pytest.raises((TypeError, OverflowError)):
            made.Launcher(*wrong)
    with pytest.raises(TypeError):
        made.Known()
    with pytest.raises(TypeError):
        made.Known(*[None] * 26)
    with pytest.raises(TypeError):
        made.Known(*[None] * 22, 1, 1, True, True)
