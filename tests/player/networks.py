"""Small networks and packages for the tests of the player."""

from __future__ import annotations

import torch

from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.package_file import ADDRESS, COPY, FILL, LAUNCH, VALUE
from sparse_bridge.tools.networks import spconv as networks

CODE = b"\x7fELF" + bytes(44) + b"\x4c\x00\x00\x00" + bytes(12)  # as far as the pretended drivers look


class Model(torch.nn.Module):
    """A network from features and coordinates to plain tensors. dense: to a grid, else rows and their places."""

    def __init__(self, sp, network, grid, dense, n_items=2):
        super().__init__()
        self.sp, self.network, self.grid, self.dense, self.n_items = sp, network, list(grid), dense, n_items

    def forward(self, features, coords):
        y = self.network(self.sp.SparseConvTensor(features, coords, self.grid, self.n_items))
        return y.dense() if self.dense else {"rows": y.features, "places": y.indices}


def second(sp):
    grid = (41, 24, 32)
    return Model(sp, networks.Second(sp, widths=(8, 16, 16, 32), out_channels=32), grid, True), grid


def unet(sp):
    grid, widths = (16, 16, 32), {"encoder": (16, 32), "decoder": (32, 16), "blocks": (1, 1), "stem": 8}
    return Model(sp, networks.ResidualUNet(sp, **widths), grid, False), grid


def encoder(sp):
    """Rows of a deeper level."""
    grid = (16, 16, 32)
    layers = [
        sp.SubMConv3d(4, 8, 3, indice_key="a"),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        sp.SparseConv3d(8, 16, 3, stride=2, padding=1),
    ]
    return Model(sp, sp.SparseSequential(*layers), grid, False), grid


def ready(model):
    """In eval mode, with weights and statistics at random, none of which is neutral; activations stay within half
    precision."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            outputs = max(parameter.shape[0], parameter.shape[-1])
            torch.nn.init.normal_(parameter, std=(3 * outputs / parameter.numel()) ** 0.5)
        elif name.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def scene(grid, rows, seed=0, channels=4, dtype=torch.float32):
    """(features, coords) of two batch items."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (2, *grid)
    cells = torch.randperm(torch.Size(sizes).numel(), generator=generator)[:rows]
    coords = torch.stack(torch.unravel_index(cells, sizes), 1).int()
    return torch.randn(rows, channels, generator=generator).to(dtype), coords


def tiny(target="cuda:87"):
    """A program that no network is behind: every kind of step, of argument and of record."""
    f32, i32 = torch.float32, torch.int32
    kernel = package_file.Kernel("first", CODE, 3, 128, 0)
    other = package_file.Kernel("second", CODE + b"other   ", 1, 64, 1 << 16)
    args = (package_file.Arg(ADDRESS, 8, 512), package_file.Arg(VALUE, 4, 7), package_file.Arg(VALUE, 8, 1 << 40))
    steps = (
        package_file.Step(FILL, value=0xFFFFFFFF, to=0, size=64),
        package_file.Step(LAUNCH, 0, (3, 2, 1), args),
        package_file.Step(COPY, to=1024, start=512, size=100),
        package_file.Step(LAUNCH, 1, (1, 1, 1), (package_file.Arg(ADDRESS, 8, 2048),)),
    )
    return package_file.Program(
        target,
        4096,
        16,
        256,
        0,
        (kernel, other),
        steps,
        (package_file.Constant(3072, b"weights!"), package_file.Constant(3328, bytes(16))),
        ((3328, 512), (3336, 1024)),
        (package_file.Tensor("coords", i32, 0, (16, 4), 512), package_file.Tensor("features", f32, 0, (16, 4), 768)),
        (package_file.Tensor("grid", f32, -1, (1, 2, 3), 1024), package_file.Tensor("rows", f32, 2, (40, 3), 2048)),
        (package_file.Level(2, 40, 16),),
        ((0, 1), (1, 2), (1, 3)),
    )
