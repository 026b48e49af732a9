"""The program that takes compute-sanitizer over the layers, with another program in its place."""

from __future__ import annotations

import json
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

from tests.patience import PATIENCE

FILE = pathlib.Path(__file__).parents[2] / "tools" / "sanitize.py"
# What the tool prints; the program under it runs only as far as its arguments.
PRETENDED = """\
#!{python}
import sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 1")
    sys.exit(0)
tool, layer = sys.argv[sys.argv.index("--tool") + 1], sys.argv[sys.argv.index("--layer") + 1]
assert sys.argv[sys.argv.index("--target-processes") + 1] == "all"
if (tool, layer) == ("synccheck", "pools"):
    sys.exit("no driver")
found = 3 if (tool, layer) == ("racecheck", "norms") else 0
if tool == "racecheck":
    print(f"========= RACECHECK SUMMARY: {{found}} hazards displayed (3 errors, 0 warnings)")
else:
    print(f"========= ERROR SUMMARY: {{found}} errors")
sys.exit(9 if found else 0)
"""


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(FILE))


@pytest.fixture
def pretended(tmp_path):
    path = tmp_path / "sanitizer"
    path.write_text(PRETENDED.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_layers_run(program, monkeypatch):
    """Every one on the CPU, with gradients where it has some."""
    for run in program["LAYERS"].values():
        monkeypatch.setitem(run.__globals__, "ROWS", 60)
    flows = {name for name in program["LAYERS"] if name.endswith(program["FLOWS"])}
    assert len(program["LAYERS"]) > 20 and len(flows) == 3
    for name, run in program["LAYERS"].items():
        if name not in flows:  # dataflows that no CPU has
            run(torch.device("cpu"))


def test_what_is_found_is_kept(program, pretended, tmp_path, capsys):
    path = tmp_path / "record.json"
    options = ["--program", str(pretended), "--device", "cpu", "--json", str(path)]
    layers = ["--layer", "pools", "--layer", "norms"]
    tools = [word for tool in program["TOOLS"] for word in ("--tool", tool)]
    assert program["main"]([*options, *layers, *tools]) == 1
    kept = json.loads(path.read_text())
    assert kept["failed"] == 2 and len(kept["answers"]) == 8
    assert kept["sanitizer"] == ["Version 1"]
    bad = {(one["tool"], one["layer"]): one for one in kept["answers"] if "said" in one}
    assert bad["racecheck", "norms"]["found"] == 3 and bad["synccheck", "pools"]["found"] is None
    assert "no driver" in bad["synccheck", "pools"]["said"]
    assert capsys.readouterr().out.count("nothing found") == 6
    assert program["main"]([*options, "--layer", "norms", "--tool", "memcheck"]) == 0


def test_without_the_tool(program, capsys):
    assert program["main"](["--program", "no-such-sanitizer"]) == 2
    assert "not here" in capsys.readouterr().err


def test_a_layer_in_its_own_process():
    words = [sys.executable, str(FILE), "--layer", "depthwise", "--device", "cpu"]
    subprocess.run(words, cwd=FILE.parents[1], check=True, timeout=PATIENCE)
