"""Gradients of weights by Triton kernels: what of such a product does not depend on its map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ....kernels.gemm.product import Product
from ...device.precision import product_precision
from ...maps.rulebook import Rulebook
from ...tuning.problem import wgrad_problem
from ...tuning.tuner import Trial, final, tile_for
from ..dataflow import LayerProduct, new_key, unit_channels

if TYPE_CHECKING:
    from ....kernels.gemm.wgrad_gemm import WgradGemm
    from ....kernels.gemm.wgrad_spec import WgradSpec
    from ....kernels.tiles.tile import TileConfig


class WgradProduct:
    """dw[v] = sum of x[i]^T dy[j]."""

    __slots__ = ("_key", "_specs", "product")

    def __init__(self, layer: LayerProduct) -> None:
        target, device, dtype, precision, w, _ = layer
        assert target is not None
        precision = product_precision(target, dtype, precision, wgrad=True)
        self.product, self._key = Product(target, device, dtype, precision, w), new_key()
        self._specs: dict[tuple[Any, ...], WgradSpec] = {}

    def __call__(self, rulebook: Rulebook, side: int, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> None:
        """x [n_rows[1 - side], C_in], dy [n_rows[side], C_out], neither empty; dw is written
        whole. Twin in C: `wgraded`."""
        if x.stride()[1] != 1 or dy.stride()[1] != 1:
            x, dy = unit_channels(x), unit_channels(dy)
        launch = rulebook.cache.get(self._key + side)
        if launch is None:
            launch = self._bind(rulebook, side, x, dy, dw)
        elif rulebook.order is not None and rulebook.order.number() not in rulebook.order.waited:
            rulebook.order.wait()
        launch(x, dy, dw)

    def _bind(self, rulebook: Rulebook, side: int, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> WgradGemm:
        """The launch over the map's pair lists; kept with the map where the lists are."""
        from ....kernels.gemm.wgrad_gemm import WgradGemm

        target, n_in, n_out = self.product.target, x.shape[0], dy.shape[0]
        pairs = rulebook.device_pairs(target)
        lists = (pairs.in_rows, pairs.out_rows, pairs.starts)
        if side:
            lists = (lists[1], lists[0], lists[2])
        n_pairs = pairs.likely << pairs.mirrored
        rows, density = (n_out // target.compute_units).bit_length(), max(n_pairs, 1) / n_out
        key = (pairs.mirrored, rows, n_pairs.bit_length(), round(math.log2(density)))
        spec = self._specs.get(key)
        if spec is None:
            trial = Trial(
                lambda tile: WgradGemm(
                    self.spec(tile, pairs.mirrored), lists, n_in, n_out, pairs.likely, pairs.longest
                ),
                (x, dy),
                lambda: torch.empty_like(dw),
            )
            problem = wgrad_problem(self.product, n_out, n_in, n_pairs)
            spec = self.spec(tile_for(problem, trial), pairs.mirrored)
            if final():
                self._specs[key] = spec
        launch = WgradGemm(spec, lists, n_in, n_out, pairs.likely, pairs.longest)
        if pairs.lasting:
            rulebook.cache.put(self._key + side, launch)
        return launch

    def spec(self, tile: TileConfig, mirrored: bool) -> WgradSpec:
        """The kernel with a tile.  mirrored: for lists of half of the offsets."""
        from ....kernels.gemm.wgrad_spec import WgradSpec

        return WgradSpec(self.product, tile, mirrored)
