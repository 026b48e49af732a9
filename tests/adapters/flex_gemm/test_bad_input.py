"""Every argument of every function, given something else: one typed error."""

from __future__ import annotations

import importlib

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.errors import ArgumentTypeError, ArgumentValueError
from sparse_bridge.errors import SparseBridgeError

from .test_convolutions import voxels, weights

F32 = torch.float32
LAST = (2, 6, 7, 5, 4)
TENSORS = {
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
    "text": lambda t: "x",
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "one number": lambda t: t.reshape(-1)[0],
    "one more axis": lambda t: t.unsqueeze(0),
}
NUMBERS = {
    "None": lambda s: None,
    "half a cell": lambda s: tuple(n + 0.5 for n in s),
    "not a number": lambda s: tuple(float("nan") for _ in s),
    "text": lambda s: "abc",
    "words": lambda s: ("a",) * len(s),
    "nested": lambda s: tuple((n,) for n in s),
    "one entry less": lambda s: s[:-1],
    "one entry more": lambda s: (*s, 1),
    "empty": lambda s: (),
    "negative": lambda s: tuple(-n for n in s),
}
WORDS = {"another word": lambda w: "nope", "a number": lambda w: 3, "nothing": lambda w: None}


def wrong(value):
    if isinstance(value, torch.Tensor):
        return TENSORS
    return WORDS if isinstance(value, str) else NUMBERS


def first():
    """(path below flex_gemm, arguments) of 1.x."""
    feats, coords, shape = voxels(40, 4, dtype=F32)
    weight, bias, cubes = weights(4, 6, (3, 3, 3), dtype=F32), torch.zeros(6), (3, 3, 3)
    conv = {"feats": feats, "coords": coords, "shape": tuple(shape), "weight": weight, "bias": bias}
    layer = {"stride": (2, 2, 2), "padding": (1, 1, 1), "dilation": (1, 1, 1)}
    place = {"coords": coords, "shape": tuple(shape), "kernel_size": cubes}
    table = {"keys": torch.full((90,), -1, dtype=torch.int32), "vals": torch.zeros(90).int()}
    wanted = coords[:, 1].contiguous()
    sums = {"input": feats, "indices": torch.zeros(5, 8).int(), "weight": torch.rand(5, 8)}
    codes = {"code": torch.arange(9).int(), "shape": tuple(shape), "mode": "hilbert"}
    return {
        "ops.spconv.sparse_submanifold_conv3d": {**conv, "dilation": (1, 1, 1)},
        "ops.spconv.sparse_conv3d": {**conv, **layer, "out_coords": coords},
        "ops.spconv.SubMConv3dFunction._compute_neighbor_cache": {**place, "dilation": (1, 1, 1)},
        "ops.spconv.SparseConv3dFunction._get_output_coords": {**place, **layer},
        "ops.spconv.SparseConv3dFunction._compute_neighbor_cache": {**place, **layer, "out_coords": coords},
        "ops.grid_sample.grid_sample_3d": {
            "feats": feats,
            "coords": coords,
            "shape": tuple(shape),
            "grid": torch.rand(2, 9, 3),
            "mode": "nearest",
        },
        "ops.serialize.encode_seq": {"coords": coords, "shape": tuple(shape), "mode": "z_order"},
        "ops.serialize.decode_seq": codes,
        "sparse_submanifold_conv": {**conv, "dilation": (1, 1, 1)},
        "sparse_submanifold_conv_any_offset": {
            "feats": feats,
            "coords": coords,
            "offsets": torch.zeros(1, 3).int(),
            "weight": weight[:, 0, 0, :1],
            "bias": bias,
        },
        "kernels.triton.indice_weighed_sum_fwd": sums,
        "kernels.cuda.hashmap_insert": {**table, "k": wanted, "v": wanted},
        "kernels.cuda.hashmap_lookup": {**table, "k": wanted},
    }


def second():
    """The same of 2.0."""
    feats, coords, _ = voxels(40, 4, dtype=F32)
    weight, bias = weights(4, 6, (3, 3, 3), dtype=F32), torch.zeros(6)
    rows = {"feats": feats, "coords": coords, "shape": LAST}
    layer = {"stride": (2, 2, 2), "dilation": (1, 1, 1)}
    conv = {**rows, "weight": weight, "bias": bias, **layer}
    given = {"output_coords": coords, "output_shape": LAST}
    box = {"shape": LAST, "kernel_size": (3, 3, 3), **layer}
    delta = {"shape": LAST, "kernel_delta": torch.zeros(1, 3).int(), "stride": (2, 2, 2)}
    size, kernel = "ops.compute_strided_kernel_size", {"kernel_size": (3, 3, 3)}
    wide = {**rows, "feats": feats.repeat(1, 2)}
    return {
        "ops.submanifold_conv3d": {**rows, "weight": weight, "bias": bias, "dilation": (1, 1, 1)},
        "ops.sparse_conv3d": {**conv, **given},
        "ops.sparse_conv_transpose3d": {**conv, **given},
        "ops.submanifold_pool3d": {**rows, **kernel, "reduce": "max"},
        "ops.sparse_pool3d": {**rows, **kernel, "reduce": "mean"},
        "ops.sparse_upsample3d": {**rows, "scale_factor": (2, 2, 2), "mode": "nearest"},
        "ops.sparse_pixel_shuffle3d": {**wide, "upscale_factor": (2, 2, 2)},
        "ops.sparse_pixel_unshuffle3d": {**rows, "downscale_factor": (2, 2, 2)},
        "ops.sparse_grid_sample": {
            "feats": feats,
            "coords": coords,
            "grid": torch.rand(7, 4),
            "mode": "linear",
            "padding_mode": "zeros",
        },
        "ops.sparse_to_dense": rows,
        "ops.sort_coords": {"coords": coords},
        "ops.coalesce_coords": {"coords": coords},
        "ops.build_neighbor_cache": {"coords": coords, "shape": LAST, **kernel, **layer, "padding": (1, 1, 1)},
        f"{size}_output_shape": box,
        f"{size}_transpose_output_shape": box,
        f"{size.replace('size', 'delta')}_output_shape": delta,
        f"{size.replace('size', 'delta')}_transpose_output_shape": delta,
    }


def call(package, path, arguments):
    function = package
    for part in path.split("."):
        function = getattr(function, part)
    return function(**arguments)


def served(package, table):
    """(function, argument, what became of it) of the calls that are served."""
    found = set()
    for path, arguments in table.items():
        call(package, path, dict(arguments))  # as it is, every one is
        for name, value in arguments.items():
            for kind, change in wrong(value).items():
                try:
                    call(package, path, {**arguments, name: change(value)})
                except SparseBridgeError as error:
                    assert len(str(error)) > 20
                else:
                    found.add((path.rpartition(".")[2], name, kind))
    return found


# None: the bounds of the coordinates. Offsets come as nested sequences too.
BOUNDS = {"sparse_submanifold_conv3d", "_compute_neighbor_cache", "sparse_submanifold_conv"}
OFFSETS = {"a list", "an array"}


def test_first_generation(flex_gemm):
    offsets = {("sparse_submanifold_conv_any_offset", "offsets", kind) for kind in OFFSETS}
    assert served(flex_gemm, first()) == {(name, "shape", "None") for name in BOUNDS} | offsets


def test_second_generation(flex_gemm):
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        found = served(importlib.import_module("flex_gemm"), second())
    shapes = [path.rpartition(".")[2] for path in second() if "_output_shape" in path]
    assert found == {
        ("submanifold_conv3d", "shape", "None"),
        ("submanifold_pool3d", "shape", "None"),
        ("sparse_conv3d", "output_shape", "None"),
        ("sparse_conv_transpose3d", "output_shape", "None"),
        ("sparse_grid_sample", "grid", "one more axis"),  # points come in any form
        ("build_neighbor_cache", "padding", "negative"),
        *((name, "shape", f"one entry {more}") for name in shapes for more in ("less", "more")),
        *((name, "kernel_delta", kind) for name in shapes if "delta" in name for kind in OFFSETS),
    }


@pytest.mark.parametrize("given", ["x", 3, {}, torch.zeros(40, 27).int()])
def test_what_is_no_cache(flex_gemm, given):
    feats, coords, shape = voxels(40, 4, dtype=F32)
    weight = weights(4, 6, (3, 3, 3), dtype=F32)
    for name in ("sparse_submanifold_conv3d", "sparse_conv3d"):
        with pytest.raises(ArgumentTypeError, match="neighbour cache"):
            getattr(flex_gemm.ops.spconv, name)(feats, coords, shape, weight, None, given)


@pytest.mark.parametrize(
    "array",
    [torch.rand(40, 27), [1], torch.zeros(1, 40, 27).int(), torch.full((40, 27), 40).int(), None],
    ids=["fp32", "list", "3-d", "beyond the rows", "none"],
)
def test_caches_that_hold_no_map(flex_gemm, array):
    feats, coords, shape = voxels(40, 4, dtype=F32)
    weight = weights(4, 6, (3, 3, 3), dtype=F32)
    kind = flex_gemm.ops.spconv.SubMConv3dNeighborCache
    cache = kind() if array is None else kind(neighbor_map=array)
    with pytest.raises(SparseBridgeError):
        flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, cache)


def test_sampling_where_coordinates_are_no_numbers(flex_gemm):
    """Coordinates of any dtype are taken; what is no number, or beyond int32, lies nowhere."""
    feats, coords, shape = voxels(40, 4, dtype=F32)
    grid = coords[None, :, 1:].float() + 0.5
    grid = grid.expand(2, -1, -1)
    sample = flex_gemm.ops.grid_sample.grid_sample_3d
    want = sample(feats, coords, shape, grid, "nearest")
    for other in (coords.double(), coords.long(), coords.half()):
        assert torch.equal(sample(feats, other, shape, grid, "nearest"), want)
    odd = coords.double()
    odd[:10], odd[10:20], odd[20:30] = float("nan"), 2.0**32, float("-inf")
    found = sample(feats, odd, shape, grid, "nearest")
    left = sample(feats[30:], coords[30:], shape, grid, "nearest")
    assert torch.equal(found, left) and left.any()
    beyond = coords.long()
    beyond[:30] += 1 << 32
    assert torch.equal(sample(feats, beyond, shape, grid, "nearest"), left)


def test_kernels_and_codes_beyond_what_is_held(flex_gemm):
    _, coords, shape = voxels(40, 4, dtype=F32)
    functions = flex_gemm.ops.spconv.SubMConv3dFunction
    with pytest.raises(ArgumentValueError, match="kernel offsets"):
        functions._compute_neighbor_cache(coords, shape, (1001, 1001, 1), (1, 1, 1))
    with pytest.raises(ArgumentValueError, match="at most 64"):
        flex_gemm.ops.serialize.decode_seq(torch.zeros(3).long(), (1, 1, 1, 1, 1 << 22))
    with pytest.raises(ArgumentValueError, match="at most 21"):
        flex_gemm.kernels.cuda.z_order_encode(coords, 22, torch.zeros(40).long())
    with pytest.raises(ArgumentValueError, match="integers of at least 0"):
        flex_gemm.ops.utils.init_hashmap(shape, -1, "cpu")
