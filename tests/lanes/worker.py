"""pytest in a process of its own: `python -m tests.lanes.worker NODES` answers its exit status and
how many tests passed."""

from __future__ import annotations

import sys

import pytest

from sparse_bridge.tools.harness.processes import channel, write


class Passed:
    """A plugin that counts."""

    def __init__(self):
        self.count = 0

    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call" and report.passed


if __name__ == "__main__":
    answers, passed = channel(), Passed()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]], [passed])
    write(answers, status=int(status), passed=passed.count)
