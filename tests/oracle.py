"""Independent truths: dense torch convolutions up to 3-D, and maps as sets of triples."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.clouds import densify, sample

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def dense_conv(x, x_coords, shape, weight, y_coords, stride, padding, dilation, groups=1):
    """Rows at `y_coords` of a dense convolution in fp64, x [N, C_in] at distinct `x_coords`.

    weight: ([V, C_in / groups, C_out], kernel size). y coordinates may lie outside the grid.
    """
    batch_size, kernel = _batches(x_coords, y_coords), box_weight(weight)
    dense = densify(x.double(), x_coords, batch_size, shape)
    # As much margin as the outermost output needs; where it has none, the last cells are cut.
    margin, steps = [], zip(shape, padding, stride, dilation, kernel.shape[2:], strict=True)
    for axis, (extent, p, s, d, k) in enumerate(steps):
        last = int(y_coords[:, axis + 1].max()) if len(y_coords) else 0
        margin.append((p, last * s - p + d * (k - 1) + 1 - extent))
    dense = F.pad(dense, [m for pair in reversed(margin) for m in pair])
    dense = _CONV[len(shape)](dense, kernel, stride=stride, dilation=dilation, groups=groups)
    return sample(dense, y_coords)


def dense_conv_transpose(x, x_coords, shape, weight, y_coords, stride, padding, dilation, groups=1):
    """Rows at `y_coords` of a dense transposed convolution in fp64; otherwise as `dense_conv`."""
    batch_size, kernel = _batches(x_coords, y_coords), box_weight(weight)
    # [C_out, C_in / groups, *kernel] -> [C_in, C_out / groups, *kernel]
    kernel = torch.cat([part.transpose(0, 1) for part in kernel.chunk(groups, 0)], 0)
    dense = densify(x.double(), x_coords, batch_size, shape)
    full = _CONV_TRANSPOSE[len(shape)](dense, kernel, stride=stride, dilation=dilation, groups=groups)
    inside, place = torch.ones(len(y_coords), dtype=torch.bool), y_coords.clone()
    for axis, p in enumerate(padding):
        place[:, axis + 1] += p
        inside &= (place[:, axis + 1] >= 0) & (place[:, axis + 1] < full.shape[axis + 2])
    y = full.new_zeros((len(y_coords), full.shape[1]))
    return y.index_put((inside.nonzero().squeeze(1),), sample(full, place[inside]))


def box_weight(weight):
    """([V, C_in, C_out], kernel size), row-major offsets -> torch's [C_out, C_in, *kernel]."""
    tensor, kernel = weight
    return tensor.double().reshape(*kernel, *tensor.shape[1:]).movedim((-1, -2), (0, 1))


def _batches(*coords):
    return 1 + max((int(c[:, 0].max()) for c in coords if len(c)), default=0)


def triples(kmap):
    """{(v, in row, out row)} of a kernel map's pair lists."""
    found = set()
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        pairs = list(zip(x_rows.tolist(), y_rows.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        found |= {(v, i, j) for i, j in pairs}
    return found


def pair_triples(pairs):
    """The same of `reference.Pairs`."""
    return {
        (v, i, j)
        for v, (x_rows, y_rows) in enumerate(pairs)
        for i, j in zip(x_rows.tolist(), y_rows.tolist(), strict=True)
    }
