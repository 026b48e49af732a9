"""`doctor`: what it gathers, and that a bug report made of it says what went wrong."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

import sparse_bridge
from sparse_bridge import __main__ as command_line
from sparse_bridge import settings
from sparse_bridge.adapters import base
from sparse_bridge.core.device import rocm, self_check
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.tools import doctor
from tests.fake_gpu import HOPPER


@pytest.fixture
def no_frameworks(monkeypatch, plain_settings):
    """Nothing to try out: these tests are about the machine."""
    monkeypatch.setattr(base, "ADAPTERS", {})


@pytest.fixture
def gpu(fake_gpu, monkeypatch, no_frameworks):
    """A GPU that is not there; `gpu[part] = problem` makes a part of its self-check fail."""
    problems = {}

    class Properties:
        name, total_memory = "NVIDIA H200", 141 << 30

    fake_gpu.has(count=1, properties=Properties, target=HOPPER)
    fake_gpu.has(unavailable=lambda device: "CPU tensors take torch" if device.type == "cpu" else None)
    self_check.reset()
    monkeypatch.setattr(self_check, "find_problem", lambda device, target, part: problems.get(part))
    yield problems
    fake_gpu.gone()
    monkeypatch.undo()
    self_check.reset()


def shown(facts):
    stream = io.StringIO()
    doctor.show(facts, Console(file=stream, width=200, markup=False, highlight=False))
    return stream.getvalue()


def test_a_gpu_that_passes(gpu):
    facts = doctor.collect()
    cpu, device = facts["devices"]
    assert (cpu["device"], cpu["self_check"]) == ("cpu", [])
    assert (device["device"], device["name"]) == ("cuda:0", "NVIDIA H200")
    assert (device["warp_size"], device["compute_units"]) == (32, 132)
    parts = {verdict["part"]: verdict["problem"] for verdict in device["self_check"]}
    assert parts == dict.fromkeys(self_check.parts_of(targets.described("sm_90")))
    text = shown(facts)
    for word in ("Self-check", "passed", "NVIDIA H200", "132 compute units", "227 KiB", "sm_90"):
        assert word in text
    assert json.loads(json.dumps(facts)) == facts


def test_a_part_that_fails_is_told(gpu):
    gpu["bf16"] = "bf16 products failed the self-check (largest error 3.0e+00)"
    facts = doctor.collect()
    (verdict,) = [v for v in facts["devices"][1]["self_check"] if v["problem"]]
    assert verdict["part"] == "bf16" and verdict["problem"] == gpu["bf16"]
    assert gpu["bf16"] in shown(facts)


def test_a_gpu_without_memory_can_still_be_reported(gpu, monkeypatch):
    def full(device, target, part):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(self_check, "find_problem", full)
    problems = {v["problem"] for v in doctor.collect()["devices"][1]["self_check"]}
    assert problems == {"not checked: the GPU has no memory left"}
    assert self_check.failures() == ()


def test_status_and_report_tell_of_a_failed_part(gpu, world):
    """In words, for every framework that is bridged."""
    name = world.framework("working").name
    with sparse_bridge.enable(name) as handle:
        before = handle.status()[name].notes
        gpu["fp16"] = "fp16 products failed the self-check (wrong)"
        self_check.run(torch.device("cuda", 0), HOPPER, "fp16")
        *others, note = handle.status()[name].notes
        assert tuple(others) == before
        for text in (note, str(handle.report()), str(sparse_bridge.report())):
            for word in ("cuda:0", "fp16 products failed the self-check", "per-offset"):
                assert word in text


def test_caches(no_frameworks, monkeypatch, tmp_path):
    tuning, compiled = tmp_path / "tuning", tmp_path / "compiled" / "deep"
    tuning.mkdir()
    compiled.mkdir(parents=True)
    (tuning / "h200.json").write_bytes(b"x" * 100)
    for number in range(3):
        (compiled / f"{number}.cubin").write_bytes(b"x" * 1000)
    folders = {"tuning": tuning, "Triton": tmp_path / "compiled", "none": tmp_path / "missing"}
    monkeypatch.setattr(doctor, "cache_folders", lambda: folders)
    found = {one["cache"]: (one["files"], one["bytes"]) for one in doctor.collect()["caches"]}
    assert found == {"tuning": (1, 100), "Triton": (3, 3000), "none": (0, 0)}


def test_the_folders_of_the_caches(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    with settings.override(cache_dir=str(tmp_path / "s")):
        folders = doctor.cache_folders()
    helper = tmp_path / "s" / "native"
    player = tmp_path / "s" / "player"
    assert folders == {"tuning": tmp_path / "s", "helper in C": helper, "player": player, "Triton": tmp_path / "t"}


def test_what_the_helper_keeps_is_not_counted_as_tuning(no_frameworks, tmp_path):
    (tmp_path / "native").mkdir()
    (tmp_path / "sm_90.json").write_bytes(b"x" * 100)
    (tmp_path / "native" / "helper.so").write_bytes(b"x" * 1000)
    with settings.override(cache_dir=str(tmp_path)):
        found = {one["cache"]: (one["files"], one["bytes"]) for one in doctor.collect()["caches"]}
    assert found["tuning"] == (1, 100) and found["helper in C"] == (1, 1000)


def test_variables_that_bear_on_a_result(no_frameworks, monkeypatch):
    given = {
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "SPARSE_BRIDGE_SPEED": "11",
    }
    for name, value in {**given, "SECRET_TOKEN": "abc"}.items():
        monkeypatch.setenv(name, value)
    facts = doctor.collect()
    assert facts["environment"].items() >= given.items()
    assert "SECRET_TOKEN" not in facts["environment"]
    assert facts["unknown_variables"] == ["SPARSE_BRIDGE_SPEED"]
    text = shown(facts)
    assert "HSA_OVERRIDE_GFX_VERSION" in text and "no such setting" in text


def test_a_file_of_pinned_tiles_that_is_not_there(no_frameworks, plain_settings, tmp_path):
    with settings.override(tune="pinned", tune_file=tmp_path / "gone.json"):
        (said,) = [text for text in doctor.collect(self_check=False)["warnings"] if "TUNE=pinned:FILE" in text]
    assert "gone.json" in said and "No such file" in said


def test_expandable_segments_on_rocm(no_frameworks, fake_gpu, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert doctor.collect()["warnings"] == []
    fake_gpu.has(hip="7.2.1")
    warning, *others = doctor.collect()["warnings"]  # some are about Triton's release
    assert any("ROCm 7.2.0 to 7.2.3" in other for other in others)
    assert warning == rocm.allocator_warning() and "PYTORCH_CUDA_ALLOC_CONF" in warning
    assert warning[:60] in shown(doctor.collect())


@pytest.mark.gpu
def test_on_this_gpu(capsys):
    assert command_line.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    checked = [v for device in facts["devices"] for v in device["self_check"]]
    assert len(checked) >= 4 and not any(verdict["problem"] for verdict in checked)
