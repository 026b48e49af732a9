"""Calls in worker processes: what they return, raise, and lose when a process crashes."""

from __future__ import annotations

import os
import time
from concurrent.futures import as_completed

import pytest

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.harness.pool import CrashedError, Pool


class Awkward(Exception):
    """Cannot be made again from what it shows."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def called(what, value=None):
    """Runs in a worker."""
    print("noise on standard output")
    if what == "abort":
        os.abort()
    if what == "raise":
        raise SettingError("as asked")
    if what == "awkward":
        raise Awkward(1, 2)
    if what == "wait":
        time.sleep(600)
    return os.getpid(), value


def test_one_that_crashes_costs_its_own_call():
    with Pool(2) as pool:
        futures = {pool.submit(called, "abort" if n == 2 else "", n): n for n in range(6)}
        found = {futures[done]: done for done in as_completed(futures)}
    with pytest.raises(CrashedError, match="killed by SIGABRT: Fatal Python error: Aborted"):
        found.pop(2).result()
    assert {n: one.result()[1] for n, one in found.items()} == {n: n for n in (0, 1, 3, 4, 5)}
    processes = {one.result()[0] for one in found.values()}
    assert os.getpid() not in processes and len(processes) <= 3


def test_what_a_call_raises_is_raised():
    with Pool(1) as pool:
        first = pool.submit(called, "", 1).result()[0]
        with pytest.raises(SettingError, match="as asked") as caught:
            pool.submit(called, "raise").result()
        assert "in called" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match=r"^Awkward: 1 and 2$"):
            pool.submit(called, "awkward").result()
        assert pool.submit(called, "", 2).result() == (first, 2)  # the process lives on


def test_an_interrupted_run_leaves_no_process():
    with pytest.raises(KeyboardInterrupt), Pool(1) as pool:
        pool.submit(called, "", 0).result()
        running, waiting = pool.submit(called, "wait"), pool.submit(called, "wait")
        while not running.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert waiting.cancelled()
    with pytest.raises(CrashedError, match="killed"):  # nobody waited for its answer
        running.result()
