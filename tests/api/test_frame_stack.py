"""Frames with room, by the pages that calls meet for the first time."""

import sys

import pytest

from sparse_bridge.commands import run as command
from sparse_bridge.core.device.frame_stack import ONE_CALL, with_room

# Most page faults of a thousand calls, wherever in a chunk they are.
PROGRAM = """
import resource, sys

def leaf():
    pass

def calls():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def behind(slots):
    def enter():
        return calls()
    enter.__code__ = enter.__code__.replace(co_stacksize=slots)
    return enter()

found = max(behind(slots) for slots in range(8, 2040, 8))
with open(sys.argv[1], "w") as file:
    file.write(str(found))
"""


def faults(tmp_path, monkeypatch, run):
    program, found = tmp_path / "program.py", tmp_path / "found"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", [str(program), str(found)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    run(str(program), [str(found)])
    return int(found.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
def test_programs_keep_their_frames_in_one_chunk(tmp_path, monkeypatch):
    def plain(program, arguments):
        exec(compile(PROGRAM, program, "exec"), {"__name__": "__main__"})

    if faults(tmp_path, monkeypatch, plain) < 1000:
        pytest.skip("this Python keeps its frames otherwise")
    assert faults(tmp_path, monkeypatch, lambda *given: command.execute(*given, False)) < 500


def test_functions_with_room():
    roomy = with_room(lambda *args, **more: (args, more))
    assert roomy(1, 2, a=3) == ((1, 2), {"a": 3})
    assert roomy.__code__.co_stacksize == ONE_CALL
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 / 0)()
