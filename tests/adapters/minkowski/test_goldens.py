"""Recorded answers of MinkowskiEngine 0.5.4, replayed by their own runner."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import warnings

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import registry
from tests import checks
from tests.recorded import RECORDED

pytestmark = RECORDED
FOLDER = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "minkowski"
CASES = json.loads((FOLDER / "public" / "manifest.json").read_text())["cases"]

spec = importlib.util.spec_from_file_location("run_minkowski_golden", FOLDER / "run_golden.py")
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)


def replay(ME, device):
    """Ids of the cases that fail, with the runner's reason."""
    wrong = {}
    for entry in CASES:
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arrays = runner.load_arrays(FOLDER / "public" / entry["file"])
                runner.run_case(ME, entry, arrays, device)
        except Exception as error:
            wrong[entry["id"]] = f"{type(error).__name__}: {error}"
        finally:
            runner.reset_globals(ME)
    return wrong


def test_every_public_case(ME):
    assert len(CASES) == 166
    assert replay(ME, "cpu") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dataflow", ["masked", "unmasked", "per_offset"])
def test_every_public_case_on_the_gpu(ME, dataflow):
    """Cases that keep tensors on the CPU stay there, so kernel dataflows are chosen, not forced."""
    assert not torch.backends.cuda.matmul.allow_tf32
    forced = "per_offset" if dataflow == "per_offset" else "auto"
    with registry.preferred(dataflow), settings.override(dataflow=forced):
        assert replay(ME, "cuda") == {}


@pytest.mark.emulated
def test_every_public_case_on_kernels(ME, kernel_lane):
    assert replay(ME, kernel_lane.device) == {}


# Layers whose values are rounded inputs times weights, and nothing that a tie or a threshold moves.
FAMILIES = ("conv", "channelwise", "transpose", "generative")
HALVES = [
    pytest.param(device, dtype, id=f"{device}-{str(dtype)[6:]}", marks=marks)
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("device", "dtype"), HALVES)
def test_convolutions_in_half_precision(ME, device, dtype):
    entries = [e for e in CASES if e["family"] in FAMILIES and e["kind"] == "net"]
    assert len(entries) >= 30
    for entry in entries:
        arrays = runner.load_arrays(FOLDER / "public" / entry["file"])
        if len(entry["spec"]["layers"]) != 1:
            continue  # rounding between layers is another question
        half_case(ME, entry, arrays, device, dtype)


def half_case(ME, entry, arrays, device, dtype):
    """One layer in `dtype`, forward and backward, within that dtype's tolerance."""
    case = runner.expand(entry["spec"])
    env = runner.Env(ME, case, arrays, device)
    weights = {k[2:]: torch.from_numpy(v.copy()) for k, v in arrays.items() if k.startswith("w.")}
    env.finish_modules(weights)
    env.mods.to(dtype)
    leaf = env.vars["feats"].detach().to(dtype).requires_grad_()
    stride = entry["spec"].get("tensor_stride", 1)
    x = ME.SparseTensor(leaf, env.vars["coords"], tensor_stride=stride)
    y = env.mods["net"](x)
    assert y.F.dtype == dtype
    order = runner.match_rows("y", y.C.cpu().numpy(), arrays["out.y.C"])
    y.F.backward(torch.from_numpy(arrays["gout.y"][order]).to(y.F))
    checks.assert_close(y.F, torch.from_numpy(arrays["out.y.F"][order]), dtype, entry["id"])
    checks.assert_close(leaf.grad, torch.from_numpy(arrays["grad.in.feats"]), dtype, entry["id"])
    for name, value in env.mods.named_parameters():
        want = torch.from_numpy(arrays[f"grad.w.{name}"])
        checks.assert_close(value.grad, want, dtype, f"{entry['id']} {name}")
