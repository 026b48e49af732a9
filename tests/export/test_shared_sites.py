"""Networks of which several nodes work on the same sites."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
from sparse_bridge.export import export_onnx
from tests.quick import quick

from .test_onnx_file import scene, sparse_nodes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Sites(nn.Module):
    """Two layers, as a chain or side by side."""

    def __init__(self, sp, kind, keys, **options):
        super().__init__()
        self.kind = kind
        if kind == "twice strided":
            self.layers = nn.ModuleList(sp.SparseConv3d(4, 4, 3, 2, 1, indice_key=key, **options) for key in keys)
        else:
            sizes = (3, 5) if kind == "two kernels" else (3,) * len(keys)
            self.layers = nn.ModuleList(
                sp.SubMConv3d(4, 4, size, padding=padding, indice_key=key, **options)
                for padding, (key, size) in enumerate(zip(keys, sizes, strict=True))
            )

    def forward(self, x):
        first, second = self.layers
        if self.kind == "chain":
            y = second(first(x))
            return y, y.dense()
        if self.kind == "one layer twice":
            return first(first(x))
        if self.kind == "two kernels":
            return {"a": first(x), "b": second(x)}
        y, z = first(x), second(x)
        return y.replace_feature(y.features + z.features), y.features, z.dense()


KEYS = {"one key": ("a", "a"), "two keys": ("a", "b"), "no keys": (None, None)}
KINDS = ("chain", "branches", "one layer twice", "two kernels", "twice strided")


@pytest.mark.parametrize("native", quick([False], [False, True]))
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_that_share_sites(sp, kind, keys, native):
    """Values that two nodes give are two objects: torch's trace cannot tell them apart else."""
    if keys == "one key" and kind in ("two kernels", "twice strided"):
        pytest.skip("not one key's map")
    options = {"algo": sp.ConvAlgo.Native} if native else {}
    torch.manual_seed(0)
    net = Sites(sp, kind, KEYS[keys], **options).eval()
    x = scene(sp)
    for legacy in (True, False):  # twice in one process, of the same tensor
        proto = export_onnx(net, x, verify=True, legacy=legacy)
    again = export_onnx(net, scene(sp, 90, 3), verify=True)
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in proto.graph.node]
    maps = [n for n in sparse_nodes(proto) if n.op_type.startswith("GetIndice")]
    assert len(maps) == (2 if kind == "two kernels" else 1)  # of one geometry, whatever the keys
    assert not any(n.op_type == "IndiceConv" for n in sparse_nodes(proto)) or kind == "two kernels"
    assert not native or all(layer.algo is sp.ConvAlgo.Native for layer in net.layers)
