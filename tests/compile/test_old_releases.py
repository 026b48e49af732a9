"""Before torch 2.8 sparse layers run between graphs: the same numbers in every framework."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.quick import quick

ROOT = pathlib.Path(__file__).parents[2]

# The release is taken from `torch.__version__`, so that newer ones go the same way.
PROGRAM = """
import copy, sys, torch
if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 7):
    torch.__version__ = torch.torch_version.TorchVersion("2.7.0")
from sparse_bridge.core.device.torch_compat import WHOLE_GRAPHS
from tests.compile.comparison import assert_same, compare_gradients, gradients
from tests.compile.programs import PROGRAMS, scene

assert not WHOLE_GRAPHS
with PROGRAMS[sys.argv[1]]() as programs:
    for make in list(programs.values())[:2]:
        for training in (True, False):
            program = make().train(training)
            twin = copy.deepcopy(program)
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="aot_eager")
            for number in range(2):
                features, coords = scene(number)
                with torch.set_grad_enabled(training):
                    y, expected = compiled(features, coords), twin(features, coords)
                assert_same(y, expected)
                if training:
                    y.square().mean().backward()
                    expected.square().mean().backward()
                    compare_gradients(gradients(program), gradients(twin))
    try:
        torch.compile(program, backend="aot_eager", fullgraph=True)(*scene(0))
    except torch._dynamo.exc.Unsupported:
        print("DONE", sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("api", quick(["spconv"], ("spconv", "patched spconv", "torchsparse", "minkowski")))
def test_layers_run_between_graphs(api):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, api]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.stdout == f"DONE {api}\n", done.stderr[-2000:]
