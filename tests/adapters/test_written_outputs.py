"""Programs may change coordinates of a layer's output in place; the next call of the layer over the
same input is not to see that."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge.core import functional
from tests.adapters import standins

COORDS = torch.cartesian_prod(torch.arange(2), *[torch.arange(6)] * 3).int()
FEATURES = torch.randn(len(COORDS), 4)


def _spconv():
    with standins.standin("spconv"):
        import spconv.pytorch as sp

        conv = sp.SparseConv3d(4, 4, 3, 2, 1, bias=False)

        def run(coords):
            y = conv(sp.SparseConvTensor(FEATURES, coords, [6] * 3, 2))
            return y.indices, y.features

        yield run


def _torchsparse():
    with standins.standin("torchsparse"):
        import torchsparse
        import torchsparse.nn as spnn

        conv = spnn.Conv3d(4, 4, 2, 2)

        def run(coords):
            y = conv(torchsparse.SparseTensor(FEATURES, coords))
            return y.coords, y.feats

        yield run


def _minkowski():
    with standins.standin("minkowski"):
        import MinkowskiEngine as ME

        conv = ME.MinkowskiConvolution(4, 4, 3, 2, dimension=3)

        def run(coords):
            y = conv(ME.SparseTensor(FEATURES, coords))
            return y.C, y.F

        yield run


def _flex_gemm():
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        import flex_gemm

        weight = torch.randn(4, 2, 2, 2, 4)

        def run(coords):
            features, places, _ = flex_gemm.ops.spconv.sparse_conv3d(
                FEATURES, coords, torch.Size((2, 4, 6, 6, 6)), weight, None, stride=(2, 2, 2), padding=(0, 0, 0)
            )
            return places, features

        yield run


def _flex_gemm_2():
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        import flex_gemm

        weight = torch.randn(4, 2, 2, 2, 4)

        def run(coords):
            features, places, *_ = flex_gemm.ops.sparse_conv(
                FEATURES, coords, (2, 6, 6, 6, 4), weight, None, stride=2, padding=0, dilation=1
            )
            return places, features

        yield run


APIS = {
    "spconv": _spconv,
    "torchsparse": _torchsparse,
    "minkowski": _minkowski,
    "flex_gemm": _flex_gemm,
    "flex_gemm 2": _flex_gemm_2,
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("api", APIS)
def test_the_next_call_makes_its_own(api, inference):
    made = APIS[api]()
    run = next(made)
    with torch.inference_mode() if inference else torch.no_grad():
        coords = COORDS.clone()
        first = run(coords)
        want = [one.clone() for one in first]
        first[0][:, 1:] += 7
        again = run(coords)
        assert torch.equal(again[0], want[0]) and torch.equal(again[1], want[1])
    made.close()


def test_maps_over_what_was_changed_are_those_of_the_new_coordinates():
    made = _spconv()
    run = next(made)
    with torch.no_grad():
        coords, _ = run(COORDS.clone())
        coords[:, 1] += 1
        box = functional.coordinate_map(coords, [4, 3, 3], 2)
    assert torch.equal(box.coords, coords)
    made.close()
