"""One row that is not zero under an asymmetric kernel of counted offsets, in exact numbers."""

import pytest
import torch

from sparse_bridge.core import functional
from tests.clouds import cloud
from tests.core.layers import KINDS, SHAPES, layer

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

KERNEL, STRIDE, PADDING, DILATION = (2, 3, 1, 2), (2, 1, 3, 2), (0, 1, 0, 1), (1, 2, 1, 1)


def impulse_layer(kind, dimension, device):
    part = slice(0, dimension)
    stride = (1,) * dimension if kind == "submanifold" else STRIDE[part]
    return layer(kind, dimension, KERNEL[part], stride, PADDING[part], DILATION[part], device=device, seed=5)


def offset_between(made, x_site, y_site):
    """Index of the offset that joins two coordinates, or None."""
    transposed = made.kind in ("generative", "inverse")
    fine, coarse = (y_site, x_site) if transposed else (x_site, y_site)
    if fine[0] != coarse[0]:
        return None
    index = 0
    steps = zip(fine[1:], coarse[1:], made.kernel, made.stride, made.padding, made.dilation, strict=True)
    for f, c, k, s, p, d in steps:
        offset, rest = divmod(f - s * c + p, d)
        if rest or not 0 <= offset < k:
            return None
        index = index * k + offset
    return index


@pytest.mark.parametrize("dimension", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_impulse_meets_the_right_offsets(map_lane, kind, dimension):
    made = impulse_layer(kind, dimension, map_lane.device)
    row = max(range(len(made.x_coords)), key=lambda i: sum(i in x.tolist() for x, _ in made.pairs))
    source = made.x_coords[row].tolist()
    indices = [offset_between(made, source, site) for site in made.y_coords.tolist()]
    assert any(offset is not None for offset in indices)
    x = torch.zeros(len(made.x_coords), 2, device=map_lane.device)
    x[row] = torch.tensor([1.0, 64.0])
    first = torch.arange(1.0, made.volume + 1).view(-1, 1, 1)
    weight = torch.cat([first, -first], 1) @ torch.tensor([[1.0, 1000.0]])  # [V, 2, 2]
    weight = weight.to(map_lane.device).requires_grad_()
    y = functional.conv(x, weight, None, made.kmap)
    value = torch.tensor([0.0 if offset is None else offset + 1.0 for offset in indices]).view(-1, 1)
    assert torch.equal(y.cpu(), value * torch.tensor([-63.0, -63000.0]))
    # One output row asks: its gradient reaches one offset of the weight.
    out_row = next(j for j, offset in enumerate(indices) if offset is not None)
    dy = torch.zeros_like(y)
    dy[out_row] = torch.tensor([3.0, 5.0])
    y.backward(dy)
    want = torch.zeros_like(weight)
    want[indices[out_row]] = torch.tensor([[3.0, 5.0], [192.0, 320.0]])
    assert torch.equal(weight.grad.cpu(), want.cpu())


@pytest.mark.parametrize("dimension", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_impulse_reaches_the_right_rows(map_lane, kind, dimension):
    made = impulse_layer(kind, dimension, map_lane.device)
    y_row = max(range(len(made.y_coords)), key=lambda j: sum(j in y.tolist() for _, y in made.pairs))
    target = made.y_coords[y_row].tolist()
    indices = [offset_between(made, site, target) for site in made.x_coords.tolist()]
    assert any(offset is not None for offset in indices)
    x = torch.zeros(len(made.x_coords), 1, device=map_lane.device, requires_grad=True)
    weight = torch.arange(1.0, made.volume + 1, device=map_lane.device).view(-1, 1, 1)
    y = functional.conv(x, weight, None, made.kmap)
    dy = torch.zeros_like(y)
    dy[y_row] = 7.0
    y.backward(dy)
    want = torch.tensor([0.0 if offset is None else 7.0 * (offset + 1) for offset in indices]).view(-1, 1)
    assert torch.equal(x.grad.cpu(), want)


@pytest.mark.parametrize("dimension", SHAPES)
def test_a_single_voxel(map_lane, dimension):
    """One active coordinate in an empty grid, at its corner."""
    coords = torch.zeros(1, 1 + dimension, dtype=torch.int32)
    for kind in ("submanifold", "strided", "generative", "inverse"):
        made = layer(kind, dimension, coords=coords, batch_size=1, device=map_lane.device)
        x = torch.ones(len(made.x_coords), 1, device=map_lane.device)
        weight = torch.arange(1.0, made.volume + 1, device=map_lane.device).view(-1, 1, 1)
        y = functional.conv(x, weight, None, made.kmap).flatten().tolist()
        center = made.volume // 2 + 1.0
        if kind == "generative":
            assert sorted(y) == [float(v) for v in range(1, made.volume + 1)]
        elif kind == "inverse":
            assert y == [center * len(x)]
        else:
            assert y == [center]


def test_the_batch_separates(map_lane):
    """Equal coordinates in different batch items never meet."""
    coords = cloud((5, 5), 1, 0.5, seed=2)
    both = torch.cat([coords, coords + torch.tensor([1, 0, 0], dtype=torch.int32)])
    made = layer("submanifold", shape=(5, 5), coords=both, device=map_lane.device)
    x = torch.cat([torch.ones(len(coords), 1), torch.zeros(len(coords), 1)]).to(map_lane.device)
    y = functional.conv(x, torch.ones(9, 1, 1, device=map_lane.device), None, made.kmap)
    assert (y[: len(coords)] >= 1).all() and not y[len(coords) :].any()
