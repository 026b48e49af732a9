"""Networks of four frameworks, packaged, played by the C code and executed on the emulator, against Python's layers."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import tolerances

from . import networks, zoo
from .played import ROWS, Played, expected, packaged

pytest.importorskip("amd_emulator")
pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def inputs_of(network, rows, seed, dtype=torch.float32):
    return networks.scene(network.grid, rows, seed, dtype=dtype)


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_results_are_those_of_the_layers(gpu, tmp_path, name):
    """In every bit where no layer of torch takes part, for any number of rows, whatever memory held before."""
    path = tmp_path / "model.sbp"
    with zoo.network(name) as own:
        played = Played(gpu, path, packaged(path, own.model, own.inputs(*inputs_of(own, 250, 1))))
        for seed, rows in enumerate((250, 37, ROWS)):
            features, coords = inputs_of(own, rows, seed)
            if own.inputs(features, coords) != (features, coords) and seed:
                coords[:, 1:] = 3 * coords[:, 1:] - 20 * seed  # other bounds than the example's
            wanted = expected(own.model, *own.inputs(features, coords))
            played.poison()
            for mine, theirs in zip(played(features, coords), wanted, strict=True):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                if own.exact or not mine.is_floating_point():
                    assert torch.equal(mine, theirs), (seed, (mine - theirs).abs().max())
                else:
                    assert (mine - theirs).norm() / theirs.norm() < tolerances.of("network", mine.dtype).rms
        assert played.unchanged()
        played.close()
