"""Recorded answers of spconv 2.3.8, replayed by their own runner through both doors."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from tests import checks
from tests.recorded import RECORDED

from . import doors

pytestmark = RECORDED
FOLDER = doors.ROOT / "tests" / "goldens" / "spconv"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def replay(tmp_path, mode, *options, first="", **environment):
    """The runner's verdict on every public case, one dict each."""
    result = tmp_path / "result.json"
    # Some cases end in torch's own dense convolutions, which round to TF32 on a GPU by default.
    code = first + "import torch; torch.backends.cudnn.allow_tf32 = False; "
    code += f"import sparse_bridge; sparse_bridge.enable('spconv', mode={mode!r})"
    doors.python(
        RUN, str(FOLDER / "run_golden.py"), "--cases", str(FOLDER / "public"), "--quiet",
        "--json", str(result), "--enable", code, *options, **environment,
    )  # fmt: skip
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
    chosen = (
        "from sparse_bridge.core.conv import registry; "
        f"registry.preferred({dataflow!r}).__enter__(); "
    )
    forced = "per_offset" if dataflow == "per_offset" else "auto"
    options = ("--device", "cuda")
    cases = replay(tmp_path, "standin", *options, first=chosen, SPARSE_BRIDGE_DATAFLOW=forced)
    assert [case["id"] for case in cases if not case["ok"]] == []


HALVES = [
    pytest.param(device, dtype, id=f"{device}-{str(dtype)[6:]}", marks=marks)
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("device", "dtype"), HALVES)
@pytest.mark.parametrize("family", ["subm", "conv", "inverse", "transpose", "conv1x1"])
def test_half_precision(standin, family, device, dtype):
    spec = importlib.util.spec_from_file_location("run_golden", FOLDER / "run_golden.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    env = runner.Env(device=device)
    manifest = json.loads((FOLDER / "public" / "manifest.json").read_text())
    entries = [entry for entry in manifest["cases"] if entry["family"] == family]
    # Rounding makes ties in max pools, which move gradients.
    entries = [entry for entry in entries if "Pool" not in json.dumps(entry["spec"])]
    assert len(entries) >= 5
    for entry in entries:
        case, arrays = runner.load_case(str(FOLDER / "public"), entry)
        compare_in(runner, env, case, arrays, dtype, entry["id"])


def compare_in(runner, env, case, arrays, dtype, name):
    """Forward and backward of one recorded net in `dtype`, within that dtype's tolerance."""
    net = runner.build(env, ["SparseSequential", {"layers": case["layers"]}])
    runner.load_weights(net, arrays, env)
    net.to(dtype)
    leaf, x = runner.make_tensor(env, case["tensor"], arrays, False)
    leaf = leaf.to(dtype).requires_grad_()
    y = net(x.replace_feature(leaf))
    rows = runner.match_rows(y.indices.cpu().numpy(), arrays["out_indices"], False)
    aligned = y.features[torch.from_numpy(rows).to(leaf.device)]
    aligned.backward(torch.from_numpy(arrays["gout"]).to(aligned))
    assert aligned.dtype == leaf.grad.dtype == dtype
    wanted = {"out_features": aligned, "g:in_features": leaf.grad}
    wanted.update({f"g:{key}": value.grad for key, value in net.named_parameters()})
    for key, got in wanted.items():
        checks.assert_close(got, torch.from_numpy(arrays[key]), dtype, f"{name} {key}")
