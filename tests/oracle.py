"""An independent, slow truth for kernel maps: dictionaries of Python integers."""

from __future__ import annotations

import itertools

import torch


def box_taps(kernel):
    return list(itertools.product(*(range(k) for k in kernel)))


def relation(coords, batch_size, shape, out_coords, offsets, stride):
    """{(v, in row, out row)}: in coordinate = out coordinate * stride + offset v, both inside their batch."""
    rows = {}
    for row, site in enumerate(coords.tolist()):
        inside = 0 <= site[0] < batch_size and all(
            0 <= c < s for c, s in zip(site[1:], shape, strict=True)
        )
        if inside:
            rows.setdefault(tuple(site), []).append(row)
    found = set()
    for out_row, site in enumerate(out_coords.tolist()):
        for v, offset in enumerate(offsets):
            want = (site[0], *(c * s + o for c, s, o in zip(site[1:], stride, offset, strict=True)))
            for row in rows.get(want, ()):
                found.add((v, row, out_row))
    return found


def strided_sites(coords, batch_size, shape, offsets, stride, out_shape):
    """Output sites in the documented order: by the first input row that reaches them, then by offset."""
    seen = {}
    for site in coords.tolist():
        if not (
            0 <= site[0] < batch_size
            and all(0 <= c < s for c, s in zip(site[1:], shape, strict=True))
        ):
            continue
        for offset in offsets:
            moved = [c - o for c, o in zip(site[1:], offset, strict=True)]
            if any(m % s for m, s in zip(moved, stride, strict=True)):
                continue
            out = tuple(m // s for m, s in zip(moved, stride, strict=True))
            if all(0 <= c < s for c, s in zip(out, out_shape, strict=True)):
                seen.setdefault((site[0], *out), None)
    return list(seen)


def convolve(x, coords_rows, weight, n_out):
    """fp64 y[out] += x[in] @ w[v] over a relation; weight [C_out, *kernel, C_in]."""
    c_out, c_in = weight.shape[0], weight.shape[-1]
    taps = weight.double().reshape(c_out, -1, c_in)
    y = torch.zeros(n_out, c_out, dtype=torch.float64)
    x = x.double()
    for v, in_row, out_row in coords_rows:
        y[out_row] += taps[:, v] @ x[in_row]
    return y


def triples(kmap):
    """{(v, in row, out row)} of a kernel map's pair lists."""
    found = set()
    for v in range(kmap.n_offsets):
        x_rows, y_rows = kmap.pair_list(v)
        pairs = list(zip(x_rows.tolist(), y_rows.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        found |= {(v, i, j) for i, j in pairs}
    return found
