"""Recorded answers of FlexGEMM 1.x, on torch's code and on kernels."""

from __future__ import annotations

import functools
import json
import pathlib

import pytest

from tests.goldens.flexgemm import run_golden
from tests.recorded import RECORDED

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated, RECORDED]
PUBLIC = pathlib.Path(run_golden.__file__).parent / "public"


@functools.cache
def cases():
    return json.loads((PUBLIC / "manifest.json").read_text())["cases"]


def arrays_of(case):
    return run_golden.load_arrays(str(PUBLIC / case["file"])) if case["file"] else {}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_recorded(case, map_lane):
    arrays = arrays_of(case)
    run_golden.judge(run_golden.Env(device=map_lane.device), case["spec"], arrays)


def test_every_family_is_there():
    families = {case["family"] for case in cases()}
    wanted = {"subm", "algorithms", "dtype", "cache", "sparse", "grid", "codes", "net", "error"}
    assert families == wanted | {"surface"} and len(cases()) == 96
