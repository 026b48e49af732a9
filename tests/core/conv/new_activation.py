"""A process in which SiLU is one activation more, by its row alone: what each API and the graphs fuse.

python -m tests.core.conv.new_activation
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sparse_bridge.core.conv import activations


def add_row():
    """Before anything reads the table."""
    activations.ACTIVATIONS["silu"] = activations.Activation(
        "silu",
        lambda y, _: F.silu(y),
        lambda y, _: F.silu(y, inplace=True),
        (F.silu,),
        (),
        activations.ACTIVATIONS["sigmoid"].arguments,
        nn.SiLU,
    )


def spconv_unit():
    """Features are taken out, and activated by torch's function."""
    import spconv.pytorch as sp

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = sp.SparseSequential(sp.SubMConv3d(4, 8, 3, indice_key="a"), nn.BatchNorm1d(8), nn.SiLU())
            self.conv, self.norm = sp.SubMConv3d(8, 8, 3, indice_key="a"), nn.BatchNorm1d(8)

        def forward(self, x):
            y = self.conv(self.first(x))
            return y.replace_feature(F.silu(self.norm(y.features)))

    return Unit()


def torchsparse_unit():
    from torchsparse import nn as spnn

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.SiLU(True))
            self.conv, self.norm, self.silu = spnn.Conv3d(8, 8, 3), spnn.BatchNorm(8), spnn.SiLU()

        def forward(self, x):
            return self.silu(self.norm(self.conv(self.first(x))))

    return Unit()


def minkowski_unit():
    import MinkowskiEngine as ME

    def unit(c_in):
        conv = ME.MinkowskiConvolution(c_in, 8, kernel_size=3, dimension=3)
        return nn.Sequential(conv, ME.MinkowskiBatchNorm(8), ME.MinkowskiSiLU())

    return nn.Sequential(unit(4), unit(8))


def check(name, unit, seen):
    """Both convolutions of a network end in the new activation, with its values."""
    from tests.test_optimization import APIS, INPUTS, ROWS, settle

    with APIS[name](), torch.no_grad():
        torch.manual_seed(0)
        coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0).int()
        x, rows = INPUTS[name](coords, torch.randn(len(coords), 4)), ROWS[name]
        model = settle(unit())
        with torch.enable_grad():
            want = rows(model(x)).detach()
        for _ in range(3):
            model(x)
        del seen[:]
        torch.testing.assert_close(rows(model(x)) + 0, want, rtol=1e-4, atol=1e-5)
        assert seen == ["silu", "silu"], (name, seen)


def check_graphs():
    """Of a call by name in a graph, and of torch's function behind a product of Inductor's."""
    import sparse_bridge.compile  # noqa: F401 - registers the operators
    from sparse_bridge.core import functional as sparse
    from sparse_bridge.core.compile import fusion

    coords = torch.unique(torch.randint(0, 5, (40, 4)) % torch.tensor([1, 5, 5, 5]), dim=0).int()
    x, weight, rest = torch.randn(len(coords), 4), torch.randn(27, 4, 5), torch.randn(len(coords), 5)

    def run(coords, residual=None, activation="silu"):
        kmap = sparse.submanifold(sparse.coordinate_map(coords, (5, 5, 5), 1), sparse.kernel_offsets((3, 3, 3)))
        return sparse.conv(x, weight, None, kmap, activation=activation, residual=residual)

    graphs = []

    def fused(graph, inputs):
        fusion.fuse(graph.graph)
        graph.recompile()
        graphs.append(str(graph.code))
        return graph

    with torch.no_grad():
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        for residual in (None, rest):
            torch.testing.assert_close(compiled(coords, residual), run(coords, residual), rtol=1e-4, atol=1e-5)
        behind = torch.compile(lambda coords: F.silu(run(coords, None, None)), backend=fused, fullgraph=True)
        torch.testing.assert_close(behind(coords), run(coords), rtol=1e-4, atol=1e-5)
    assert "conv_fused" in graphs[0] and "silu(" not in graphs[0].replace("'silu'", ""), graphs[0]


def main():
    add_row()
    from sparse_bridge.core.conv import convolution, epilogue

    convolution.MIN_DEFERRED_ELEMENTS = [0, 0]
    seen, finish = [], epilogue.Epilogue.finish

    def noted(end, y, dtype):
        seen.append(end.activation)
        return finish(end, y, dtype)

    epilogue.Epilogue.finish = noted
    check("spconv", spconv_unit, seen)
    check("torchsparse", torchsparse_unit, seen)
    check("minkowski", minkowski_unit, seen)
    check_graphs()


if __name__ == "__main__":
    main()
