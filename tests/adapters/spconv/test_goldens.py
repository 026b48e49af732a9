"""Recorded answers of spconv 2.3.8, replayed by their own runner through both APIs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.goldens import driver, half
from tests.goldens.spconv.run_golden import SpConv
from tests.recorded import RECORDED

from . import apis

pytestmark = RECORDED
FOLDER = apis.ROOT / "tests" / "goldens" / "spconv"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def replay(tmp_path, mode, *options, first="", **environment):
    """The runner's verdict on every public case, one dict each."""
    result = tmp_path / "result.json"
    # Some cases end in torch's own dense convolutions, which round to TF32 on a GPU by default.
    code = first + "import torch; torch.backends.cudnn.allow_tf32 = False; "
    code += f"import sparse_bridge; sparse_bridge.enable('spconv', mode={mode!r})"
    apis.python(
        RUN,
        str(FOLDER / "run_golden.py"),
        "--cases",
        str(FOLDER / "public"),
        "--quiet",
        "--json",
        str(result),
        "--enable",
        code,
        *options,
        **environment,
    )
    return json.loads(result.read_text())["cases"]


@pytest.mark.parametrize("mode", ["standin", "patch"])
def test_every_public_case(tmp_path, mode):
    if mode == "patch" and importlib.util.find_spec("spconv") is None:
        pytest.skip("the spconv wheel is not installed")
    cases = replay(tmp_path, mode)
    assert len(cases) == 126
    assert [case["id"] for case in cases if not case["ok"]] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dataflow", ["masked", "unmasked", "per_offset"])
def test_every_public_case_on_the_gpu(tmp_path, dataflow):
    """Cases that keep tensors on the CPU stay there, so kernel dataflows are chosen, not forced."""
    chosen = f"from sparse_bridge.core.conv import registry; registry.preferred({dataflow!r}).__enter__(); "
    forced = "per_offset" if dataflow == "per_offset" else "auto"
    options = ("--device", "cuda")
    cases = replay(tmp_path, "standin", *options, first=chosen, SPARSE_BRIDGE_DATAFLOW=forced)
    assert [case["id"] for case in cases if not case["ok"]] == []


@pytest.mark.parametrize(("device", "dtype"), half.LANES)
@pytest.mark.parametrize("family", ["subm", "conv", "inverse", "transpose", "conv1x1"])
def test_half_precision(standin, family, device, dtype):
    entries = [entry for entry in driver.public("spconv") if entry["family"] == family]
    # Rounding makes ties in max pools, which move gradients.
    entries = [entry for entry in entries if "Pool" not in json.dumps(entry["spec"])]
    assert len(entries) >= 5
    for entry in entries:
        half.judge(SpConv, entry, device, dtype)
