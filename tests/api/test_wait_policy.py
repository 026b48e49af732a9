"""torch's CPU threads sleep while they wait, in programs that the command line starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparse_bridge import workers
from sparse_bridge.tools import doctor
from tests.patience import PATIENCE

SCRIPT = "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"


def run(folder, **environment):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != workers.WAIT_POLICY}
    done = subprocess.run(
        [sys.executable, "-m", "sparse_bridge", "run", "--framework", "spconv", str(script)],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


@pytest.mark.slow
def test_run_sets_the_policy_and_keeps_the_users(tmp_path):
    assert run(tmp_path) == "passive"
    assert run(tmp_path, OMP_WAIT_POLICY="active") == "active"


def test_nothing_is_promised_once_torch_is_there(monkeypatch):
    monkeypatch.delenv(workers.WAIT_POLICY, raising=False)
    import torch

    assert torch is sys.modules["torch"]
    workers.wait_passively()
    assert workers.WAIT_POLICY not in os.environ


@pytest.mark.parametrize(
    ("threads", "policy", "warned"), [(2, "active", True), (2, "passive", False), (1, "active", False)]
)
def test_doctor_tells_who_spins(threads, policy, warned):
    text = doctor.threads_of({"cores": 8, "threads": threads, "wait_policy": policy})
    assert text.startswith(f"{threads} on 8 cores")
    assert ("OMP_WAIT_POLICY=passive" in text) is warned
