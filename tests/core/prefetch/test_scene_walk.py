"""How many steps of the host a scene of a new shape takes, through every framework's API."""

import re

import pytest

from sparse_bridge import native
from tests.docs.pages import ROOT

from .scene_walk import walks

# The most frames of this package: what it takes today, and a few per cent.
MOST = {
    "spconv, SECOND": (1440, 1750),
    "spconv, U-Net": (3150, 4800),
    "torchsparse, U-Net": (5100, 6350),
    "MinkowskiEngine, U-Net": (3400, 4950),
    "training: spconv, SECOND": (2150, 2750),
    "training: spconv, U-Net": (6100, 8150),
    "training: torchsparse, U-Net": (8450, 10350),
    "training: MinkowskiEngine, U-Net": (7150, 9250),
}


@pytest.fixture(scope="module")
def both():
    return {helper: dict(walks(helper)) | _training(helper) for helper in (True, False)}


def _training(helper):
    return {f"training: {name}": steps for name, steps in walks(helper, train=True)}


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("helper", [True, False])
def test_frames_of_a_scene(both, name, helper):
    if helper and native.module() is None:
        pytest.skip(native.reason())
    assert both[helper][name].frames <= MOST[name][0 if helper else 1]


def test_the_helper_saves_frames(both):
    if native.module() is None:
        pytest.skip(native.reason())
    for name in MOST:
        assert both[True][name].frames < both[False][name].frames


def test_the_table_says_so(both):
    """To a tenth: releases of Python and torch differ."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in MOST:
        row = re.search(rf"^\| {re.escape(name)} \| (\d+) / (\d+) / (\d+) \|", text, re.M)
        assert row is not None, name
        if native.module() is not None:
            said, is_ = int(row.group(1)), both[True][name].frames
            assert abs(said - is_) <= 0.1 * is_, f"{name}: {is_}"
