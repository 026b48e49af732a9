"""How many steps of the host a scene of a new shape takes, and what its maps cost, through every framework's API."""

import re

import pytest

from sparse_bridge import native
from tests.docs.pages import ROOT

from . import map_time
from .scene_walk import walks

# The most frames of this package: what it takes today, and a few per cent.
MOST = {
    "spconv, SECOND": (2590, 2880),
    "spconv, U-Net": (4580, 6220),
    "torchsparse, U-Net": (6780, 8050),
    "MinkowskiEngine, U-Net": (3400, 4950),
    "training: spconv, SECOND": (3400, 4020),
    "training: spconv, U-Net": (7500, 9600),
    "training: torchsparse, U-Net": (10080, 12180),
    "training: MinkowskiEngine, U-Net": (8570, 10800),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_frames_of_a_scene(name):
    """At most so many, fewer with the helper, and about what the page says."""
    network, train = name.removeprefix("training: "), name.startswith("training: ")
    with_helper, without = (dict(walks(helper, train, network))[network].frames for helper in (True, False))
    assert without <= MOST[name][1]
    if native.module() is None:
        pytest.skip(native.reason())
    assert with_helper <= MOST[name][0] and with_helper < without
    text = (ROOT / "docs" / "architecture.md").read_text()
    row = re.search(rf"^\| {re.escape(name)} \| (\d+) / (\d+) / (\d+) \|", text, re.M)
    assert row is not None
    # To a tenth: releases of Python and torch differ.
    assert abs(int(row.group(1)) - with_helper) <= 0.1 * with_helper, with_helper


# Network: operations of torch, launches.
LIMITS = {
    "spconv, SECOND": (28, 34),
    "spconv, U-Net": (34, 37),
    "torchsparse, U-Net": (50, 56),
    "MinkowskiEngine, U-Net": (41, 38),
}


def test_operations_and_launches():
    found = {}
    for name, net, scene in map_time.networks():
        counting = map_time.Counting()
        last = map_time.streamed(net, scene, 2, counting=counting)[-1]
        names = counting.names[-last.operations :]
        tests_own = sum("fill_" in one for one in names)  # which fill memory that is taken
        found[name] = last.operations - tests_own, last.launches
    assert found.keys() == LIMITS.keys()
    for name, (operations, launches) in found.items():
        assert operations <= LIMITS[name][0] and launches == LIMITS[name][1], found
