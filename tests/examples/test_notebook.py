"""The notebook runs from its first cell to its last, and learns what it says."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from .launch import ROOT, start, wait

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
# As a kernel does it: cells in turn in one shell, magics included.
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


@pytest.mark.sample(0)
@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_runs(device):
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    said = wait(start("-c", RUN, NOTEBOOK, **environment))
    right, total = map(int, re.search(r"(\d+) of (\d+) new shapes", said).groups())
    assert total == 40 and right >= 36, said
    assert "SparseConv3d" in said and "torchsparse" in said


def test_no_outputs_are_stored():
    """They would be of some machine and some release."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
