"""`torch.compile(model, backend="sparse_bridge")` is accepted for one release, and means "eager"."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

import sparse_bridge.compile
from tests.compile.programs import PROGRAMS, scene
from tests.releases import WHOLE_GRAPHS

SAYS = 'Type backend="eager" where you need fullgraph=True'


@WHOLE_GRAPHS
def test_whole_graphs_run_as_they_are(plain_settings):
    with pytest.warns(FutureWarning, match=SAYS):
        backend = sparse_bridge.compile.backend
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for number in range(3):
            assert torch.equal(compiled(*scene(number)), program(*scene(number)))


@pytest.mark.slow
def test_its_name_warns_also_where_nothing_is_compiled():
    """In a process of its own, as torch asks once for what a name stands for."""
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="sparse_bridge"):
        pytest.skip("sparse_bridge is not installed, so that torch does not find its entry point")
    code = "import torch; torch.compile(torch.nn.Linear(2, 2), backend='sparse_bridge')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FutureWarning" in done.stderr and SAYS in done.stderr


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        sparse_bridge.compile.other  # noqa: B018
