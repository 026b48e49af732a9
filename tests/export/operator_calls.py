"""Calls of operators that packages hold: by Python's where `sparse_bridge.compile` is imported, by
a library where that is loaded.

    python operator_calls.py FILE LIBRARY ...: writes the results of the libraries' to FILE
"""

import sys

import torch

GRID = (9, 8, 7)
ACTIVATIONS = "relu", "leaky_relu", "sigmoid"  # all rows of the table
FIRST_SEEN, ASCENDING, BY_OFFSET = range(3)


def scene(n_rows=400, batch=2, seed=0, repeated=False, outside=False):
    """(coordinates int32 [N, 4], features [N, 6])."""
    make = torch.Generator().manual_seed(seed)
    cells = torch.randperm(batch * 9 * 8 * 7, generator=make)[:n_rows]
    coords = torch.stack(torch.unravel_index(cells, (batch, *GRID)), 1).int()
    if repeated:
        coords = torch.cat([coords, coords[::3], coords[:5]])
    if outside:
        coords[3, 1], coords[10, 0], coords[20, 3] = 9, -1, -2
    return coords.contiguous(), torch.randn(len(coords), 6, generator=make)


def numbers(
    subm=False, transposed=False, order=FIRST_SEEN, kernel=3, stride=2, padding=1, dilation=1, grid=GRID, batch=2
):
    """A layer as graphs hold it, see `sparse_bridge.adapters.spconv.compiled`."""
    axes = [value for value in (kernel, stride, padding, dilation, int(transposed)) for _ in grid]
    return [3, int(subm), int(transposed), order, *axes, batch, *grid]


LAYERS = {
    "submanifold": numbers(True),
    "submanifold 5": numbers(True, kernel=5),
    "submanifold, dilated": numbers(True, dilation=2),
    "strided": numbers(),
    "strided, ascending": numbers(order=ASCENDING),
    "strided, by offset": numbers(order=BY_OFFSET),
    "strided 2": numbers(kernel=2, padding=0),
    "stride 3": numbers(kernel=2, stride=3, padding=0),
    "transposed": numbers(transposed=True),
    "transposed, by offset": numbers(transposed=True, order=BY_OFFSET, kernel=2, padding=0),
}
SCENES = {
    "scene": {},
    "repeated": {"repeated": True},
    "outside": {"outside": True},
    "both": {"repeated": True, "outside": True},
    "one row": {"n_rows": 1},
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def maps(name, coords):
    """(handle of the kernel map, coordinates of the output, offsets of the kernel)."""
    ops, layer = torch.ops.sparse_bridge, LAYERS[name]
    sites = ops.coordinates(coords)
    volume = layer[4] ** 3
    if layer[1]:
        return ops.map(coords, sites, 0, 0, "spconv", layer), coords, volume
    handle, new, _ = ops.new_map(coords, sites, 0, 0, "spconv", layer, 0)
    return handle, new, volume


def products(name, dtype=torch.float32, groups=1, c_out=8, fused=False, scale=1, **more):
    """Outputs of a layer forwards, and backwards onto its input's rows."""
    coords, x = scene(**more)
    handle, new, volume = maps(name, coords)
    make = torch.Generator().manual_seed(1)
    c_in = 6 * scale
    x = x.repeat(1, scale).to(dtype)
    weight = torch.randn(c_out, volume, c_in // groups, generator=make).to(dtype)
    back = torch.randn(c_in, volume, c_out // groups, generator=make).to(dtype)
    bias = torch.randn(c_out, generator=make).to(dtype)
    ops, form = torch.ops.sparse_bridge, (handle, "ovi", groups, "ieee", "")
    y = ops.conv(x, weight, bias, len(new), *form, False)
    results = [new, y, ops.conv(y, back, None, len(coords), *form, True)]
    if fused:
        mean, gain, beta = torch.randn(3, c_out, generator=make)
        norm = mean, mean.abs() + 0.5, gain, beta
        norm = norm if dtype.itemsize == 2 else tuple(one.to(dtype) for one in norm)
        for activation in (*ACTIVATIONS, None):
            end = (*norm, y, 1e-3, activation, 0.1)
            results.append(ops.conv_fused(x, weight, bias, len(new), *form, False, *end))
    return results


def pools(name, dtype=torch.float32, **more):
    coords, x = scene(**more)
    handle, new, _ = maps(name, coords)
    ops, x = torch.ops.sparse_bridge, x.to(dtype)
    local = [
        ops.pool(x, len(new), handle, mode, floor, False)
        for mode, floor in (("max", float("-inf")), ("max", 0.0), ("avg", 0.0), ("sum", 0.0))
    ]
    return local + [ops.global_pool(x, coords[:, 0], 4, mode) for mode in ("max", "avg", "sum")]


def grids(dtype=torch.float32, first=True):
    coords, x = scene()
    shape = [2, *GRID]
    return [torch.ops.sparse_bridge.to_dense(x.to(dtype), coords, shape, first, False, -1, 0)]


def cases():
    """Results by the name of the case."""
    made = {}
    for layer in LAYERS:
        for kind, more in SCENES.items():
            made[f"{layer}, {kind}"] = products(layer, **more)
    for dtype in DTYPES:
        for layer in ("submanifold", "strided"):
            for kind in ("scene", "both"):
                key = f"{layer}, {kind}, {dtype}"
                made[key] = products(layer, dtype, fused=True, **SCENES[kind])
                made[f"pools, {key}"] = pools(layer, dtype, **SCENES[kind])
        made[f"groups, {dtype}"] = products("submanifold", dtype, groups=2)
        made[f"grid, {dtype}"] = grids(dtype) + grids(dtype, False)
    for c_out in (1, 3, 17, 64):
        made[f"{c_out} channels"] = products("submanifold", c_out=c_out, n_rows=900, scale=7)
    return made


if __name__ == "__main__":
    for library in sys.argv[2:]:
        torch.ops.load_library(library)
    with torch.no_grad():
        torch.save(cases(), sys.argv[1])
