"""`run` beside the program: its tracebacks as python shows them, its log, its profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

from .fakes import write, write_real
from .test_command_line import machine

__all__ = ["machine"]

NET = """
    import torch
    from invented.engine import Conv
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    for _ in range(5):
        net(torch.ones(3, 4)).sum().backward()
"""


def as_python_says(text):
    """A traceback without the marks below its lines, which depend on Python."""
    return [line for line in text.splitlines() if line.strip(" ~^")]


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    return 1 / 0\nf()\n",
        "import json\njson.loads('{')\n",
        "x = = 1\n",
        "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise ValueError('b') from error\n",
        "import nonesuch\n",
        "open('nonesuch')\n",
        "raise KeyError('a\\nb')\n",
    ],
    ids=["call", "library", "syntax", "chain", "import", "file", "message"],
)
def test_a_traceback_is_the_one_of_python(machine, tmp_path, code):
    (tmp_path / "fail.py").write_text(code)
    plain = subprocess.run([sys.executable, "fail.py"], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    done = machine("run", "fail.py")
    assert done.returncode == plain.returncode == 1
    expected = [line.replace(str(tmp_path) + os.sep, "") for line in as_python_says(plain.stderr)]
    found = [line.replace(str(tmp_path) + os.sep, "") for line in as_python_says(done.stderr)]
    assert found == expected


def test_a_module_s_traceback(machine, tmp_path):
    write(tmp_path / "pack" / "__init__.py")
    write(tmp_path / "pack" / "train.py", "def f():\n    raise RuntimeError('no')\nf()")
    done = machine("run", "-m", "pack.train")
    assert done.returncode == 1 and done.stderr.count('File "') == 2
    assert "sparse_bridge" not in done.stderr and "runpy" not in done.stderr


def test_a_hook_of_the_program_sees_its_own_frames(machine, tmp_path):
    write(
        tmp_path / "hooked.py",
        """
        import sys, traceback
        def hook(kind, error, trace):
            names = [f.name for f in traceback.extract_tb(trace)]
            print(kind.__name__, names, error.__traceback__ is trace)
        sys.excepthook = hook
        def f():
            raise ValueError
        f()
        """,
    )
    done = machine("run", "hooked.py")
    assert done.stdout == "ValueError ['<module>', 'f'] True\n" and done.returncode == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_of_the_program(machine, tmp_path):
    write(tmp_path / "loop.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = machine("run", "loop.py")
    assert done.returncode == -signal.SIGINT and done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.stderr.count('File "') == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "nomodule"], "No module named nomodule"),
        (["-m", "nopack.nomodule"], "nopack"),
        (["folder"], "can't find '__main__' module"),
        (["missing.py"], "can't find 'missing.py'"),
    ],
)
def test_a_program_that_is_not_there_is_one_line(machine, tmp_path, words, said):
    (tmp_path / "folder").mkdir()
    done = machine("run", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("sparse_bridge: ") and said in done.stderr


def test_a_log_on_request(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "train.py", "import logging; print(logging.getLogger().handlers)")
    assert machine("run", "train.py").stderr == ""
    done = machine("run", "-v", "train.py")
    assert "sparse_bridge: invented is bridged, mode patch" in done.stderr
    assert done.stdout == "[]\n", "the root logger is the program's"


@pytest.mark.slow
def test_a_profile_on_request(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "train.py", NET)
    done = machine("run", "--profile", "--profile-calls", "2", "train.py", COLUMNS="200")
    assert done.returncode == 0 and done.stdout == ""
    row = next(line for line in done.stderr.splitlines() if "Sequential.0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:2] == ["Sequential.0", "Linear"] and "2" in cells
    assert "bridged" not in done.stderr, "the report was not asked for"
    options = ("--report", "--profile", "--report-json", "out.json")
    done = machine("run", *options, "train.py")
    assert "no layer has run" in done.stderr and "Profile of all modules" in done.stderr
    profile = json.loads((tmp_path / "out.json").read_text())["profile"]
    assert profile["totals"]["calls"] == 5
    assert [one["calls"] for one in profile["layers"]] == [5, 5]


@pytest.mark.slow
def test_a_program_that_fails_is_profiled_up_to_there(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "train.py", NET + "\n    raise RuntimeError('later')")
    done = machine("run", "--profile", "train.py")
    assert done.returncode == 1 and "later" in done.stderr
    assert "Profile of all modules" in done.stderr
