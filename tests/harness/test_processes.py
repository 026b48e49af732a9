"""Children that answer, print, hang, crash and end; files of results; progress in plain lines."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from sparse_bridge.tools.harness import progress as progress_module
from sparse_bridge.tools.harness import results
from sparse_bridge.tools.harness.processes import Child
from sparse_bridge.tools.harness.progress import Progress
from tests.patience import PATIENCE, wait_for

MODULE = "tests.harness.child"


@pytest.fixture
def child(tmp_path):
    log = tmp_path / "log.txt"
    found = Child(MODULE, ["a"], {**os.environ, "HARNESS": "yes"}, log)
    found.path = log
    yield found
    found.end()


def alive(pid):
    """Whether a process runs; one that ended and nobody waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_and_noise_are_kept_apart(child):
    for number in range(3):
        child.send(do="echo", number=number)
        answer = child.receive(PATIENCE)
        assert answer["echo"]["number"] == number
    assert answer["arguments"] == ["a"] and answer["set"] == "yes"
    child.end(patience=PATIENCE)
    assert child.process.returncode == 0
    assert "noise on standard output" in child.path.read_text()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_one_that_hangs_is_killed_with_what_it_started(child):
    child.send(do="hang")
    helper = child.receive(PATIENCE)["helper"]
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        child.receive(0.1)
    assert alive(helper)
    child.end()
    wait_for(lambda: not alive(helper))
    assert child.process.returncode < 0


@pytest.mark.parametrize(
    ("what", "ending"),
    [("abort", "killed by SIGABRT: Fatal Python error: Aborted"), ("raise", "ended early: ValueError: as asked")],
)
def test_how_one_ended(child, what, ending):
    child.send(do=what)
    assert child.receive(PATIENCE) is None
    assert child.ending() == ending
    child.send(do="echo")  # nobody is there: no error
    assert child.receive(PATIENCE) is None


def test_results_are_written_whole_and_read_back(tmp_path):
    path = tmp_path / "new" / "run.json"
    results.save(path, 3, {"a": [1]})
    results.save(path, 4, {"a": [2]})
    assert results.read(path) == (4, {"a": [2]})
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]
    path.write_text("[1]")
    with pytest.raises(ValueError, match="list"):
        results.read(path)


def test_a_long_run_without_a_terminal_says_what_it_does(monkeypatch, capsys):
    """On standard error, whenever it was silent for long; a short run says nothing."""
    monkeypatch.setattr(progress_module, "SILENCE", 0.05)
    said = []

    def heard(words):
        said.append(capsys.readouterr().err)
        return words in "".join(said)

    with Progress(3, "begin") as progress:
        wait_for(lambda: heard("begin (0 of 3 done, "))
        progress.start("compiling")
        progress.done()
        wait_for(lambda: heard("compiling (1 of 3 done, "))
    with Progress(1, "linking"):
        wait_for(lambda: heard("linking ("))
    monkeypatch.setattr(progress_module, "SILENCE", 30.0)
    capsys.readouterr()
    with Progress(2, "short") as progress:
        progress.start("one")
        progress.done()
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_standard_error_where_the_console_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "SILENCE", 0.01)
    said = []
    with Progress(1, "working", Console(), transient=True):
        wait_for(lambda: said.append(capsys.readouterr()) or any("working" in one.err for one in said))
    assert not any(one.out for one in said) and not capsys.readouterr().out


def test_progress_without_a_terminal_is_lines(capsys):
    with Progress(2) as progress:
        progress.start("one")
        progress.done("one is done")
        progress.note("mind the gap")
        progress.done()
        progress.done("more")
    assert capsys.readouterr().err == "[1/2] one is done\nmind the gap\n[3/2] more\n"
