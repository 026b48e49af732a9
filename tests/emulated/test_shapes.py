"""Every dtype at every usual kernel volume, with channels that fill no tile, as machine code."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.kernels.runtime import target as targets
from tests.core.layers import check, layer

pytestmark = [pytest.mark.emulated]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VOLUMES = {8: ("strided", (2, 2, 2), 0), 27: ("submanifold", (3, 3, 3), None), 125: ("submanifold", (5, 5, 5), None)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("volume", VOLUMES)
def test_forward_and_gradients(kernel_lane, volume, dtype):
    """150 to 200 rows: several workgroups, the last one partly filled."""
    kind, kernel, padding = VOLUMES[volume]
    shape = (8, 8, 7) if volume == 8 else (7, 6, 6)
    made = layer(kind, 3, kernel, padding=padding, shape=shape, device=kernel_lane.device, seed=volume)
    assert made.volume == volume and len(made.x_coords) > 128
    check(made, 17, 33, kernel_lane, dtype=dtype)


def test_accesses_out_of_bounds_are_seen(kernel_lane):
    """The emulator's checks are on: a look-up table that names a row beyond the features."""
    import amd_emulator

    from sparse_bridge.core.geometry.weights import layout_of
    from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm
    from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
    from sparse_bridge.kernels.gemm.product import Product
    from sparse_bridge.kernels.tiles.tile import TileConfig

    assert amd_emulator.cfg.check
    device = torch.device("cpu")
    nbr = torch.full((1, 64), 1 << 20, dtype=torch.int32)
    x, w, y = torch.ones(64, 16), torch.ones(1, 16, 16), torch.empty(64, 16)
    product = Product(targets.of(device), device, torch.float32, "ieee", layout_of(w, "vio"))
    gemm = GatherGemm(GemmSpec(product, TileConfig(64, 16, 16, 4, 2), False), nbr, 64, 64)
    with pytest.raises(amd_emulator.MemoryFault):
        gemm(x, w, None, y)
