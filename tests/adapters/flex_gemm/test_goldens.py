"""Recorded answers of FlexGEMM 1.x, on torch's code and on kernels."""

from __future__ import annotations

import pytest

from tests.goldens import driver
from tests.goldens.flexgemm.run_golden import FlexGEMM
from tests.recorded import RECORDED

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated, RECORDED]
CASES = driver.public("flexgemm")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded(case, map_lane):
    driver.judge(FlexGEMM, case, device=map_lane.device)


def test_every_family_is_there():
    families = {case["family"] for case in CASES}
    wanted = {"subm", "algorithms", "dtype", "cache", "sparse", "grid", "codes", "net", "error"}
    assert families == wanted | {"surface"} and len(CASES) == 96
