"""The self-check that every first use of a GPU makes, said aloud."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.device import self_check as checks
from .setup import SKIPPED, Outcome, Setup, verdict


def self_check(setup: Setup) -> Iterator[Outcome]:
    """Every part of it."""
    if setup.target is None:
        yield Outcome("self-check", SKIPPED, "no kernels serve this device")
        return
    for part in checks.parts_of(setup.target):
        result = checks.run(setup.device, setup.target, part)
        detail = f"{result.milliseconds:.0f} ms, compiling included"
        yield verdict(f"self-check, {part}", result.problem, detail)
