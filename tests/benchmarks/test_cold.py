"""First training steps counted without a GPU: what is asked for, what runs, what is reported."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from tests.conftest import EMULATED, INTERPRETED

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
counting = pytest.importorskip("benchmarks.cold.counting", reason="needs the emulator")
report = pytest.importorskip("benchmarks.cold.__main__", reason="needs the emulator")
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="has a driver of its own")]


@triton.jit
def _add_one(x_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + place, tl.load(x_ptr + place, mask=place < n) + 1, mask=place < n)


_tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in (32, 64, 128)], key=["n"])


@pytest.mark.parametrize("arch, backend", [("sm_89", "cuda"), ("gfx1100", "hip")])
def test_forms_are_counted_and_maps_are_run(arch, backend):
    """Integers are computed, many floats are not; forms are compiled for the GPU in question."""
    few, many = torch.zeros(100, dtype=torch.int32), torch.zeros(1 << 20)
    with counting.counting(arch, pretend_gpu=False) as driver:
        for _ in range(3):
            _add_one[(1,)](few, 100, BLOCK=128)
        _add_one[(1,)](many, 128, BLOCK=128)
        assert few.tolist() == [3] * 100 and not many.any()
        assert counting.names(driver.asked) == {"_add_one": 2}
        made = driver.compile(driver.asked[0].source, target=driver.named)
    assert made.metadata.target.backend == backend and (many.numel() * 4) > driver.largest


def test_what_an_autotuner_times_is_asked_for(tmp_path):
    """Every configuration is a form; none of them runs for its time."""
    x = torch.zeros(64, dtype=torch.int32)
    with counting.counting("sm_89", pretend_gpu=True) as driver:
        assert torch.cuda.get_device_capability() == (8, 9)
        _tuned(_add_one)[lambda made: (triton.cdiv(64, made["BLOCK"]),)](x, 64)
        assert len(driver.asked) == 3 and x.tolist() == [1] * 64
        seconds = driver.compile_seconds(2, str(tmp_path))
    assert len(seconds) == 2 and min(seconds) > 0


ROWS = [
    {"package": "sparse_bridge", "network": "second", "arch": "sm_89", "forms": 2, "seconds": [1, 2]},
    {"package": "spconv_triton", "network": "second", "arch": "sm_89", "forms": 40, "seconds": [1.0, 2.0, 3.0, 2.0]},
    {"package": "sparse_bridge", "network": "minkunet", "arch": "gfx942", "error": "no such GPU"},
]


def test_the_report(tmp_path):
    """A sum where all were compiled, else an estimate with its standard error."""
    assert report.total(ROWS[0]) == (3, 0.0)
    seconds, error = report.total(ROWS[1])
    assert seconds == 80.0 and error == pytest.approx(40 * 0.8165 / 2 * 0.9**0.5, rel=1e-3)
    lines = report.markdown(ROWS).splitlines()
    assert lines[2] == "| SECOND | sparse_bridge | 2 / 3 |  |"
    assert lines[3] == "| SECOND | spconv_triton | 40 / 80 ± 15 |  |"
    assert lines[4] == "| MinkUNet34 | sparse_bridge |  | no such GPU |"
    report.plot(ROWS, tmp_path / "cold.png")
    assert (tmp_path / "cold.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_command_finds_the_emulator():
    """As a user starts it: from the checkout, with nothing else on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold", "--help"],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--peer-python" in done.stdout, done.stderr
