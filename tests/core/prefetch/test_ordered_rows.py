"""Rows that prefetch has ordered, as an earlier scene's layers wanted it, stay ordered."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.conv import choice
from tests.tools.test_group_race import by_rule  # noqa: F401 - a fixture

from .waiting import Minkowski, Spconv, Torchsparse, alone, fresh, voxels  # noqa: F401

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("api", [Spconv, Torchsparse, Minkowski])
@torch.no_grad()
def test_no_table_is_made_of_tiles(by_rule, built, monkeypatch, api):  # noqa: F811
    """Whatever the rule would do for a scene by itself."""
    from sparse_bridge.kernels.maps.tile_list import TileList

    network = api()
    network.net.to(by_rule.device).eval()
    for turn in range(6):
        scene, orders = voxels(turn, by_rule.device), turn % 2 == 0
        with monkeypatch.context() as patch:
            patch.setattr(choice, "_FEW", 0.0 if orders else 1e9)  # else nothing is ordered
            if turn > 2:
                patch.setattr(TileList, "table", refused)
            built.clear()
            coords, x = network(*scene)
            assert not built or turn < 2
        rows, expected = alone(network, scene)
        assert torch.equal(coords, rows)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def refused(tiles):
    raise AssertionError("a table is made of tiles")
