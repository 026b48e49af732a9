"""What `doctor` says of releases that are known to be bad."""

from __future__ import annotations

import re

import pytest

from sparse_bridge import settings
from sparse_bridge.core.device import known_faults
from sparse_bridge.core.device.known_faults import Machine

H200 = Machine(None, (3, 6, 0), ("sm_90",), {}, "graphs")
MI300 = Machine("7.1.25424", (3, 6, 0), ("gfx942",), {}, "graphs")


def said(machine, **other):
    return " ".join(known_faults.of(machine._replace(**other)))


def test_machines_without_a_known_fault():
    assert known_faults.of(H200) == [] and known_faults.of(MI300) == []
    assert known_faults.of(H200._replace(triton=None, archs=())) == []


@pytest.mark.parametrize(
    "rocm, bad",
    [
        ("7.1.2", False),
        ("7.2.0", True),
        ("7.2.53211-e1a6bc5663", True),
        ("7.2.3", True),
        ("7.2.4", False),
        ("7.13.0", False),
        ("7.13.60850", False),
    ],
)
def test_releases_whose_graphs_are_wrong(rocm, bad):
    assert ("replayed graphs give wrong data" in said(MI300, rocm=rocm)) is bad


@pytest.mark.parametrize(
    "other, words",
    [
        ({"archs": ("gfx1201",)}, ["2^19 rows", "TORCH_BLAS_PREFER_HIPBLASLT=0", "200 kernels"]),
        ({"rocm": "6.4.0"}, ["6.4.0", "TORCH_BLAS_PREFER_HIPBLASLT=0"]),
        ({"triton": (3, 8, 0)}, ["AMDGCN_USE_BUFFER_OPS=0"]),
        ({"archs": ("gfx1151",)}, ["for minutes", "warm"]),
        ({"environment": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}, ["HSA_OVERRIDE_GFX_VERSION"]),
        ({"capture": "always"}, ["SPARSE_BRIDGE_CAPTURE=always", "unset it"]),
        ({"rocm": None, "archs": ("sm_100",)}, ["three TF32 products", "SPARSE_BRIDGE_FP32=ieee"]),
    ],
)
def test_a_fault_names_what_helps(other, words):
    text = said(MI300, **other)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "variable, other",
    [("TORCH_BLAS_PREFER_HIPBLASLT", {"rocm": "6.4.0"}), ("AMDGCN_USE_BUFFER_OPS", {"triton": (3, 7, 1)})],
)
def test_a_variable_that_is_set_already_is_not_asked_for(variable, other):
    assert variable in said(MI300, **other)
    assert variable not in said(MI300, environment={variable: "0"}, **other)


def test_settings_that_are_named_exist():
    for fault in known_faults.FAULTS:
        for name, value in re.findall(r"SPARSE_BRIDGE_([A-Z0-9]+)=(\w+)", fault.text):
            (keyword,) = settings.KEYWORDS[name]
            assert value in settings.CHOICES[keyword]


def test_the_doctor_says_it(monkeypatch):
    from sparse_bridge.tools import doctor

    monkeypatch.setattr(known_faults, "of", lambda machine: [f"capture is {machine.capture}"])
    with settings.override(capture="always"):
        assert "capture is always" in doctor.collect(self_check=False)["warnings"]
