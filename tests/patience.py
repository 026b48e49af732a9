"""How long a test waits for what has to happen."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds. A test fails by what it sees; the clock ends only one that hangs. On a busy machine a
# process that starts in two seconds has taken more than a minute.
PATIENCE = 600.0


def wait_for(holds: Callable[[], bool]) -> None:
    """Return as soon as `holds()` does."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
