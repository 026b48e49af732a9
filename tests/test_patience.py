"""What tests say does not depend on how busy the machine is: hypothesis keeps no clock, and nobody
waits for a number of seconds that somebody thought was enough."""

from __future__ import annotations

import ast
import pathlib
import time
import types

import pytest
from hypothesis import HealthCheck, settings

from tests.conftest import keeps_time
from tests.patience import PATIENCE, wait_for

TESTS = pathlib.Path(__file__).parent
# Programs that run without this package's tests, and recordings.
OTHERS = ("goldens", "amd_emulator")
WAITING = {"communicate", "join", "poll", "receive", "result", "wait"}
KEYWORDS = {"patience", "seconds", "timeout"}


def test_hypothesis_keeps_no_clock():
    for profile in ("repeatable", "new"):
        found = settings.get_profile(profile)
        assert found.deadline is None and HealthCheck.too_slow in found.suppress_health_check


def guesses(source: str) -> list[str]:
    """Calls that wait for a second or more, written as a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        limits: list[ast.expr | None] = []
        if isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][::-1], node.defaults[::-1]
            pairs = [*zip(*named, strict=False), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            limits = [value for one, value in pairs if one.arg in KEYWORDS]
        if isinstance(node, ast.Call):
            limits = [one.value for one in node.keywords if one.arg in KEYWORDS]
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
                limits += node.args[:1]
        numbers = [one.value for one in limits if isinstance(one, ast.Constant)]
        if any(isinstance(one, int | float) and one >= 1 for one in numbers):
            found.append(ast.unparse(node))
    return found


def test_nobody_guesses_how_long_something_takes():
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if not set(OTHERS) & set(path.relative_to(TESTS).parts):
            found[path.name] = guesses(path.read_text(encoding="utf-8"))
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("subprocess.run(x, timeout=60)", 1),
        ("thread.join(10)", 1),
        ("done.wait(timeout=20.0)", 1),
        ("thread.join(PATIENCE)", 0),
        ("child.receive(0.1)", 0),
        ("', '.join(names)", 0),
        ("def wait(x, timeout=500): pass", 1),
        ("def wait(*, timeout=None): pass", 0),
        ("subprocess.run(x)", 0),
        ("connection.poll(0)", 0),
    ],
)
def test_what_counts_as_a_guess(source, number):
    assert len(guesses(source)) == number


def test_modules_with_threads_and_clocks_are_timed(request):
    """CI runs them on a busy machine, too."""
    assert request.node.get_closest_marker("timed")
    assert keeps_time(types.SimpleNamespace(sleep=time.sleep, name="time"))
    assert not keeps_time(types.SimpleNamespace(pytest=pytest, number=3, words="threading"))


def test_waiting_ends():
    turns = iter([False, False, True])
    wait_for(lambda: next(turns))
    assert next(turns, "through") == "through" and PATIENCE >= 300
