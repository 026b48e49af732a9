"""Encoders of published detectors, exported: the plugins' nodes and the networks' results."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.adapters.spconv import apis

onnx = pytest.importorskip("onnx")
from sparse_bridge.export import evaluate, export_onnx, rulebook_inputs  # noqa: E402
from tests.quick import quick  # noqa: E402

from .networks import SparseEncoder, VoxelResBackBone8x, with_statistics  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NETWORKS = {  # grid, channels
    "OpenPCDet": (VoxelResBackBone8x, (41, 48, 56), 4),
    "BEVFusion": (SparseEncoder, (56, 48, 41), 5),
}
# RMS of the errors over RMS of the result. A layer's rounding is 2 ** -24 (fp32) or 2 ** -11 (fp16)
# of its result, once for folded weights and once for rows; 21 layers whose errors are independent
# add up to some sqrt(42) = 6.5 of it: 4e-7 and 3e-3. Measured: 2e-7 and 4e-4.
LIMITS = {torch.float32: 2e-6, torch.float16: 3e-3}
FORMS = {
    "now": {},
    "older": {"legacy": True},
    "float16": {"dtype": torch.float16},
    "tables as inputs": {"rulebooks": "inputs"},
    "float16, tables as inputs": {"dtype": torch.float16, "rulebooks": "inputs"},
}


@pytest.fixture(scope="module", params=NETWORKS)
def case(request):
    """A network, its results for the second scene, and two scenes: features, coordinates."""
    kind, grid, channels = NETWORKS[request.param]
    with apis.standin() as sp:
        torch.manual_seed(0)
        net = with_statistics(kind(sp, grid))
        scenes = []
        for seed, rows in enumerate((700, 400)):
            x = apis.tensor(sp, grid, channels, rows=rows, batch_size=1, seed=seed)
            scenes.append((x.features, x.indices))
        with torch.no_grad():
            want = net(*scenes[1])
        yield net, want if isinstance(want, list) else [want], *scenes


@pytest.mark.parametrize("form", quick(["now", "float16, tables as inputs"], FORMS))
def test_files_compute_what_the_network_does(case, form):
    net, want, traced, other = case
    options = FORMS[form]
    proto = export_onnx(
        net, traced, input_names=["voxels", "coors"], dynamic_axes={"voxels": {0: "n"}, "coors": {0: "n"}}, **options
    )
    onnx.checker.check_model(proto)
    tables = "rulebooks" in options
    given = rulebook_inputs(proto, other[1]) if tables else {"coors": other[1]}
    limit = LIMITS[options.get("dtype", torch.float32)]
    for got, expected in zip(evaluate(proto, {"voxels": other[0], **given}), want, strict=True):
        assert got.shape == expected.shape and got.dtype == torch.float32
        error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= limit
    kinds = Counter(node.op_type for node in proto.graph.node)
    assert kinds["ImplicitGemm"] == 21
    if form != "older":
        # Four stages and four strided layers: one map each, keys or not. Eight residual sums.
        assert kinds["GetIndicePairsImplicitGemm"] == (0 if tables else 8)
        assert kinds["BatchNormalization"] == 0 and kinds["Add"] == kinds["Relu"] == 8
