"""Convolution at its edges: repeated and dead rows, epilogues, autocast, wide offsets."""

import dataclasses

import numpy as np
import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv.convolution import conv
from sparse_bridge.core.conv.epilogue import Norm
from sparse_bridge.core.geometry.offsets import Offsets
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.kernel_map import row_pairs
from sparse_bridge.errors import UnsupportedError
from tests import reference
from tests.checks import assert_close
from tests.clouds import cloud, features
from tests.core.layers import KINDS, check, layer, leaves, tensors

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


def repeated(shape, seed=0):
    """Coordinates of which some come twice and one three times, out of order."""
    coords = cloud(shape, 2, 0.35, seed)
    coords = torch.cat([coords, coords[:6], coords[2:3]])
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed))
    return coords[order].contiguous()


def line(n):
    """Coordinates 0 .. n - 1 of one axis."""
    return torch.stack([torch.zeros(n), torch.arange(n)], 1).int()


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_coordinates(lane, kind):
    """Sums of equal inputs, copies of equal outputs; a submanifold look-up sees the first row."""
    made = layer(kind, 2, coords=repeated((9, 10)), dense=False, device=lane.device)
    check(made, 16, 16, lane)


def test_pairs_of_repeated_coordinates(map_lane):
    """Written out in the caller's rows, in both directions, where both ends repeat."""
    made = layer(
        "between", 2, coords=repeated((9, 10)), y_coords=repeated((5, 5), 1), dense=False, device=map_lane.device
    )
    for v, (x_rows, y_rows) in enumerate(made.pairs):
        want = sorted(zip(x_rows.tolist(), y_rows.tolist(), strict=True))
        found = [rows.tolist() for rows in row_pairs(made.kmap, v)]
        assert sorted(zip(*found, strict=True)) == want
        back = [rows.tolist() for rows in row_pairs(made.kmap.transposed(), v)]
        assert sorted(zip(*back[::-1], strict=True)) == want


def first_alone(made):
    """The layer in which the first of equal inputs stands for all."""
    sites = made.x_coords.tolist()
    first = torch.tensor([sites.index(site) == row for row, site in enumerate(sites)])
    pairs = [(x_rows[first[x_rows]], y_rows[first[x_rows]]) for x_rows, y_rows in made.pairs]
    return dataclasses.replace(made, kmap=made.kmap.of_first_rows(), pairs=pairs)


@pytest.mark.parametrize("kind", ["strided", "generative", "between"])
def test_the_first_of_repeated_coordinates(lane, kind):
    """In place of their sum; read backwards, it alone has a result."""
    made = first_alone(layer(kind, 2, coords=repeated((9, 10)), dense=False, device=lane.device))
    check(made, 16, 16, lane)
    back = {
        "kmap": functional.inverse(made.kmap),
        "x_coords": made.y_coords,
        "y_coords": made.x_coords,
        "pairs": [(y_rows, x_rows) for x_rows, y_rows in made.pairs],
    }
    check(dataclasses.replace(made, **back), 16, 16, lane)


def test_repeated_output_coordinates(lane):
    made = layer("between", 2, coords=repeated((9, 10)), y_coords=repeated((5, 5), 1), dense=False, device=lane.device)
    check(made, 16, 16, lane)


@pytest.mark.parametrize("groups", [1, 2])
def test_repeated_coordinates_under_other_kernels(lane, groups):
    """No zero offset, and groups: every path of a folded submanifold map."""
    coords = repeated((9, 10))
    made = layer("submanifold", 2, (2, 2), padding=(3, 0), coords=coords, dense=False, device=lane.device)
    check(made, 16, 16, lane, groups=groups)
    made = layer("submanifold", 2, coords=coords, dense=False, device=lane.device)
    check(made, 16, 16, lane, groups=groups)


def test_inverse_of_repeated_submanifold_coordinates(lane):
    """The pairs of the forward map read backwards: only the first of equal rows is ever reached."""
    made = layer("submanifold", 2, coords=repeated((9, 10)), dense=False, device=lane.device)
    pairs = [(y_rows, x_rows) for x_rows, y_rows in made.pairs]
    made = dataclasses.replace(made, kmap=functional.inverse(made.kmap), pairs=pairs)
    check(made, 16, 16, lane)


@pytest.mark.parametrize("kind", ["submanifold", "strided", "generative", "inverse"])
def test_dead_rows(lane, kind):
    """Rows outside the grid or the batch meet only themselves, and only at the zero offset."""
    coords = cloud((9, 10), 2, 0.4, seed=3)
    for row, column, value in ((0, 0, -1), (5, 0, 2), (9, 1, 9), (14, 2, -1), (20, 1, 2**31 - 1)):
        coords[row, column] = value
    coords[25] = -(2**31)
    check(layer(kind, 2, coords=coords, dense=False, device=lane.device), 16, 16, lane)


def test_dead_rows_among_repeated_ones(lane):
    coords = repeated((9, 10), 4)
    coords[1, 0] = coords[4, 0] = -1
    check(layer("submanifold", 2, coords=coords, dense=False, device=lane.device), 16, 16, lane)


@pytest.mark.parametrize(
    "activation, bias, dtype",
    [
        ("relu", True, torch.float32),
        ("relu", False, torch.float16),
        ("leaky_relu", False, torch.float32),
        ("sigmoid", True, torch.float16),
    ],
)
def test_fused_epilogue(lane, activation, bias, dtype):
    made = layer("submanifold", 2, device=lane.device)
    x, weight, shift, _ = tensors(made, 16, 16, dtype=dtype, bias=bias)
    want = made.truth(x, weight, shift)
    want = {"relu": want.relu(), "leaky_relu": torch.nn.functional.leaky_relu(want, 0.1), "sigmoid": want.sigmoid()}[
        activation
    ]
    operands = [None if t is None else t.to(lane.device) for t in (x, weight, shift)]
    y = functional.conv(*operands, made.kmap, activation=activation, alpha=0.1)
    assert_close(y, want, dtype)


def test_vectors_with_gaps(lane):
    """Every second value of a longer vector, as bias and in a norm; the plain ones before and
    after, so that no call is taken for the other."""
    made = layer("submanifold", 2, device=lane.device)
    x, weight, shift, _ = tensors(made, 16, 16)
    mean, var = features(16, 1, seed=5)[:, 0], features(16, 1, seed=6)[:, 0].square() + 0.5
    want = made.truth(x, weight, shift)
    normed = (want - mean) / (var + 1e-3).sqrt()
    x, weight, *vectors = (t.to(lane.device) for t in (x, weight, shift, mean, var))
    for gaps in (False, True, False):
        if gaps:
            kept = [torch.stack([v, v + 7], 1).flatten()[::2] for v in vectors]
            assert kept[0].stride() == (2,)
        else:
            kept = vectors
        norm = Norm(kept[1], kept[2], None, None, 1e-3)
        assert_close(functional.conv(x, weight, kept[0], made.kmap), want)
        assert_close(conv(x, weight, kept[0], made.kmap, norm=norm), normed)


def test_fused_epilogue_of_repeated_coordinates(lane):
    made = layer("submanifold", 2, coords=repeated((9, 10)), dense=False, device=lane.device)
    x, weight, shift, _ = tensors(made, 16, 16)
    want = made.truth(x, weight, shift).relu()
    operands = [t.to(lane.device) for t in (x, weight, shift)]
    assert_close(functional.conv(*operands, made.kmap, activation="relu"), want)


def test_fused_activations_refuse_gradients(lane):
    made = layer("submanifold", 1, device=lane.device)
    x, weight, _ = leaves(tensors(made, 4, 4)[:3], lane.device)
    with pytest.raises(UnsupportedError, match=r"fused relu has no gradient.*no_grad"):
        functional.conv(x, weight, None, made.kmap, activation="relu")
    with torch.no_grad():
        assert functional.conv(x, weight, None, made.kmap, activation="relu").min() >= 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repeat", [False, True])
def test_autocast(lane, dtype, repeat):
    """Results in the autocast dtype, gradients in the parameters' own."""
    coords = repeated((9, 10)) if repeat else None
    made = layer("submanifold", 2, coords=coords, dense=not repeat, device=lane.device)
    x, weight, bias, dy = tensors(made, 16, 16)
    rows, leaf_weight, shift = leaves([x, weight, bias], lane.device)
    with lane.serving(dtype):
        with torch.autocast(lane.device, dtype):
            y = functional.conv(rows, leaf_weight, shift, made.kmap)
        assert y.dtype == dtype
        y.backward(dy.to(lane.device, dtype))
    exact = leaves([t.to(dtype).double() for t in (x, weight)] + [bias.double()], "cpu")
    want = made.truth(*exact)
    want.backward(dy.to(dtype).double())
    assert_close(y, want, dtype, "y")
    for what, got, truth in zip(("dx", "dw", "db"), (rows, leaf_weight, shift), exact, strict=True):
        assert got.grad.dtype == torch.float32
        # Sums over rows are fp32 and stay fp32; the folding of equal rows rounds in between.
        rounded = repeat or what == "dx"
        assert_close(got.grad, truth.grad, dtype if rounded else torch.float32, what)


def test_autocast_leaves_fp64_alone(lane):
    made = layer("submanifold", 1, device=lane.device)
    x, weight, _, _ = tensors(made, 4, 4, dtype=torch.float64)
    with lane.serving(torch.float64), torch.autocast(lane.device, torch.bfloat16):
        y = functional.conv(x.to(lane.device), weight.to(lane.device), None, made.kmap)
    assert y.dtype == torch.float64
    assert_close(y, made.truth(x, weight), torch.float64)


def huge_map(n_x, device):
    """Three offsets that read the first and the last rows of `n_x` into five."""
    rows = torch.tensor([0, 1, n_x // 2, n_x - 2, n_x - 1], device=device)
    out = torch.arange(5, device=device)
    pairs = [(rows, out), (rows.flip(0), out), (rows[1:4], out[2:])]
    return functional.kernel_map(pairs, n_x, 5), rows


def test_offsets_beyond_32_bits(lane):
    """rows x channels >= 2^31: the last rows are read, not those where 32 bits would wrap to."""
    if not lane.kernels:
        pytest.skip("torch indexes in 64 bits")
    n_x, channels = (1 << 25) + 8, 64
    kmap, rows = huge_map(n_x, lane.device)
    x = torch.from_numpy(np.zeros((n_x, channels), np.float16))  # pages of zeros cost nothing
    x = x.to(lane.device)
    values = torch.randn(5, channels).half()
    x[rows] = values.to(lane.device)
    weight = (torch.randn(3, channels, 16) / 14).half()
    leaf_weight, exact = leaves([weight], lane.device)[0], leaves([weight.double()], "cpu")[0]
    y = functional.conv(x, leaf_weight, None, kmap)
    small = [values, values.flip(0), values[1:4]]
    want = small[0].double() @ exact[0] + small[1].double() @ exact[1]
    want = want + torch.cat([torch.zeros(2, 16), small[2].double() @ exact[2]])
    assert_close(y, want, torch.float16)
    dy = torch.randn(5, 16).half()
    y.backward(dy.to(lane.device))
    want.backward(dy.double())
    assert_close(leaf_weight.grad, exact.grad, torch.float16)
    pooled = functional.pool(x, kmap, "sum")
    want = small[0].double() + small[1].double()
    want[2:] += small[2].double()
    assert_close(pooled, want, torch.float16)


@pytest.mark.gpu
def test_results_beyond_32_bits():
    """The same sizes written instead of read."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    n_x, channels = (1 << 25) + 8, 64
    kmap, rows = huge_map(n_x, "cuda")
    x = torch.randn(5, 16).half()
    weight = (torch.randn(3, 16, channels) / 7).half()
    y = functional.conv(x.cuda(), weight.cuda(), None, functional.inverse(kmap))
    x64, weight64 = x.double(), weight.double()
    want = x64 @ weight64[0] + x64.flip(0) @ weight64[1]
    want[1:4] += x64[2:] @ weight64[2]
    assert_close(y[rows], want, torch.float16)
    y[rows] = 0
    assert not y.any()


@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_repeats_are_bitwise_equal(lane, kind):
    """On the same map and on one built anew, forward and backward."""

    def run(made):
        *operands, dy = tensors(made, 33, 48)
        operands = leaves(operands, lane.device)
        y = functional.conv(*operands, made.kmap)
        y.backward(dy.to(lane.device))
        return [y.detach(), *(t.grad for t in operands)]

    made = layer(kind, 2, device=lane.device)
    first = run(made)
    for again in (made, made, layer(kind, 2, device=lane.device)):
        for a, b in zip(first, run(again), strict=True):
            assert torch.equal(a, b)


def test_one_map_serves_many_layers(lane):
    """Plans are kept by map: other channels, dtypes and epilogues must not take one another's."""
    made = layer("strided", 2, device=lane.device)
    for c_in, c_out, dtype in ((16, 32, torch.float32), (32, 16, torch.float32), (16, 32, torch.float16)):
        check(made, c_in, c_out, lane, dtype=dtype)
        check(made, c_in, c_out, lane, dtype=dtype, bias=False)
    check(made, 16, 32, lane)


@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_one_map_serves_every_dataflow(lane, kind):
    """Each view of the pairs is made from whatever others there are, in any order."""
    flows = [lane.dataflow, "per_offset", "explicit"]
    flows += ["unmasked", "grouped", "masked", "unmasked"] if lane.kernels else []
    for order in (flows, flows[::-1]):
        made = layer(kind, 2, device=lane.device)
        for flow in order:
            with settings.override(dataflow=flow):
                check(made, 16, 16, lane)
                x = features(len(made.x_coords), 5, device=lane.device)
                pooled = functional.pool(x, made.kmap, "sum")
            assert_close(pooled, reference.pool(x.cpu(), made.pairs, len(made.y_coords), "sum"))
        check(made, 16, 16, lane, dtype=torch.float64)


@pytest.mark.parametrize(
    "values",
    [[(-1, 0), (0, -2), (0, 2), (1, 0)], [(-1, 0), (0, -2), (0, 0), (0, 2), (1, 0)], [(1, 1), (0, 0), (2, -1)]],
    ids=["hollow", "cross", "lopsided"],
)
@pytest.mark.parametrize("repeat", [False, True])
def test_offsets_of_any_shape(lane, values, repeat):
    """Symmetric lists without a middle, crosses, lists without symmetry."""
    coords = repeated((9, 10)) if repeat else None
    made = layer("submanifold", 2, coords=coords, dense=not repeat, device=lane.device)
    cmap = functional.coordinate_map(made.x_coords.to(lane.device), (9, 10), 2)
    kmap = functional.submanifold(cmap, Offsets.of(values))
    pairs = reference.submanifold_pairs(made.x_coords, cmap.box, values)
    check(dataclasses.replace(made, kmap=kmap, pairs=pairs, dense=False), 16, 16, lane)


def test_lists_that_name_a_row_twice(lane):
    """Pair lists of the user that no table can hold, with 32-bit rows."""
    x_rows = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=lane.device)
    y_rows = torch.tensor([2, 0, 2, 2, 1], dtype=torch.int32, device=lane.device)
    pairs = [(x_rows, y_rows), (y_rows[:2], x_rows[:2])]
    kmap = functional.kernel_map(pairs, 4, 4)
    made = dataclasses.replace(
        layer("submanifold", 1, coords=line(4), device=lane.device),
        kmap=kmap,
        pairs=[(x.cpu().long(), y.cpu().long()) for x, y in pairs],
        dense=False,
    )
    check(made, 16, 16, lane)


def test_submanifold_lists(lane):
    """Pair lists known to be mirrored serve as a submanifold map."""
    made = layer("submanifold", 2, device=lane.device)
    pairs = [tuple(rows.to(lane.device) for rows in pair) for pair in made.pairs]
    n = len(made.x_coords)
    kmap = map_builder.from_pairs(pairs, n, n, submanifold=True)
    assert kmap.rulebook.symmetric
    check(dataclasses.replace(made, kmap=kmap), 16, 16, lane)
