"""Offsets that are multiplied together, on CPU tensors: the same calls that a GPU gets."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.conv import chunks, host_products
from sparse_bridge.core.conv.batches import products, rule, steps
from sparse_bridge.core.conv.batches.rule import Limits, limits_of
from sparse_bridge.core.conv.chunks import chunks_of
from sparse_bridge.core.conv.dataflows import per_offset
from sparse_bridge.core.device import rocm
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps.kernel_map import KernelMap
from sparse_bridge.core.maps.pair_lists import PairLists
from sparse_bridge.core.maps.rulebook import Rulebook
from tests.checks import assert_close
from tests.clouds import features
from tests.conftest import Lane
from tests.core.layers import KINDS, check, layer

CPU = Lane("cpu", "per_offset")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL = Limits(0.99, 1 << 14, 1 << 20, 1)  # one group of everything that a part has


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """CPU tensors take the way of a GPU's; gives the shapes of all batched products."""
    multiplied, bmm = [], torch.bmm

    def counted(left, right):
        multiplied.append((tuple(left.shape), tuple(right.shape)))
        return bmm(left, right)

    monkeypatch.setattr(per_offset, "on_cpu", lambda x: False)
    monkeypatch.setattr(host_products, "_NARROW", 0)  # rows are gathered by torch
    monkeypatch.setattr(torch, "bmm", counted)
    return multiplied


@pytest.fixture(params=["embeddings", "lists"])
def sums(request, monkeypatch):
    """Both ways to add products up."""
    if request.param == "lists":
        monkeypatch.setattr(products, "_SUMS", ())
    return request.param


def limited(monkeypatch, limits):
    monkeypatch.setattr(per_offset, "limits_of", lambda c_in, c_out: limits)


def by_hand(sizes, n_x=40, n_y=30, seed=0):
    """(a map of lists of these sizes, whose rows are distinct within a list; its lists)."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (torch.randperm(n_x, generator=generator)[:n], torch.randperm(n_y, generator=generator)[:n]) for n in sizes
    ]
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    given = PairLists(*(torch.cat(rows) for rows in zip(*pairs, strict=True)), starts, False)
    return KernelMap(Rulebook(n_x, n_y, len(sizes), torch.device("cpu"), lists=given)), pairs


def truth(pairs, x, weight, dy):
    """(y, dx, dw) in fp64, pair list by pair list."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    y, dx, dw = dy.new_zeros(len(dy), weight.shape[2]), torch.zeros_like(x), []
    for matrix, (i, j) in zip(weight, pairs, strict=True):
        y.index_add_(0, j, torch.einsum("nk,km->nm", x[i], matrix))
        dx.index_add_(0, i, torch.einsum("nm,km->nk", dy[j], matrix))
        dw.append(torch.einsum("nk,nm->km", x[i], dy[j]))
    return y, dx, torch.stack(dw)


def computed(kmap, x, weight, dy):
    """(y, dx, dw) and (dx, dw) of the products that are asked for alone."""
    w, dw, alone = layout_of(weight, "vio"), torch.empty_like(weight), torch.empty_like(weight)
    y = per_offset.gather_matmul(kmap, x, weight, w)
    dx = per_offset.gradients(kmap, x, weight, dy, dw, w)
    per_offset.weight_gradient(kmap, x, dy, alone, w)
    back = per_offset.gather_matmul(kmap.transposed(), dy, weight, w.transposed())
    return (y, dx, dw), (back, alone)


SIZES = [[0, 1, 1, 1], [5, 5, 5, 5], [1], [0, 0, 0], [30, 0, 1, 29, 30], [7, 8, 9, 30], [12] * 27]


@pytest.mark.parametrize("limits", [ALL, Limits(0.4, 1 << 14, 64, 3), Limits(0.4, 9, 1 << 20, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lists_of_any_size(sizes, dtype, limits, sums, monkeypatch):
    limited(monkeypatch, limits)
    kmap, pairs = by_hand(sizes, seed=len(sizes))
    x, dy = features(40, 5, dtype=dtype), features(30, 3, 1, dtype)
    weight = (features(len(sizes) * 5, 3, 2) / 4).to(dtype).view(-1, 5, 3)
    together, apart = computed(kmap, x, weight, dy)
    want = truth(pairs, x, weight, dy)
    for got, exact in zip((*together, *apart), (*want, *want[1:]), strict=True):
        assert_close(got, exact, dtype)


@pytest.mark.parametrize(
    "sizes, batches, alone",
    [
        ([5, 0, 5, 5], [[3, 5]], []),
        ([9, 1, 8, 20, 7], [[3, 9]], [1, 20]),
        ([20, 20, 20], [[3, 20]], []),
        ([1, 2, 4, 8], [], [1, 2, 4, 8]),
    ],
)
def test_what_is_multiplied(as_on_a_gpu, sizes, batches, alone, monkeypatch):
    limits = Limits(0.3, 20, 1 << 20, 3)
    limited(monkeypatch, limits)
    kmap, pairs = by_hand(sizes)
    cut = chunks_of(kmap, 4)
    found = steps.steps_of(cut, limits)
    assert [[len(one), one.height] for one in found.batches] == batches
    assert sorted(item.n_pairs for item in found.alone) == alone
    assert steps.steps_of(cut, limits).batches == found.batches, "made once"
    for batch in found.batches:
        x_rows, y_rows = (t.view(len(batch), -1) for t in (batch.x_rows, batch.y_rows))
        for k, v in enumerate(batch.offset_indices(len(sizes), False).tolist()):
            size = sizes[v]
            assert torch.equal(x_rows[k, :size].long(), pairs[v][0])
            assert torch.equal(y_rows[k, :size].long(), pairs[v][1])
        rows, order, starts = batch.sums
        assert len(rows.unique()) == len(rows) and len(order) == sum(batch.sizes)
        owners = rows.repeat_interleave(starts.diff())
        assert torch.equal(batch.y_rows[order.long()], owners)
    per_offset.gather_matmul(
        kmap,
        features(40, 4),
        features(len(sizes) * 4, 6).view(-1, 4, 6),
        layout_of(torch.empty(len(sizes), 4, 6), "vio"),
    )
    assert as_on_a_gpu == [((n, height, 4), (n, 4, 6)) for n, height in batches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind, dtype, sums, as_on_a_gpu):
    for c_in, c_out, groups in ((16, 16, 1), (3, 5, 1), (1, 1, 1), (6, 9, 3)):
        check(layer(kind), c_in, c_out, CPU, dtype=dtype, groups=groups, seed=c_in)
    assert bool(as_on_a_gpu) == (dtype != torch.float64), "fp64 keeps to the offsets' order"


@pytest.mark.parametrize("worth", [1 << 8, 1 << 11])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_some_together_and_some_alone(kind, worth, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(rule, "WORTH", worth)
    made = layer(kind, shape=(9, 8, 40), batch_size=1, share=0.15)
    check(made, 5, 8, CPU, groups=1)
    found = steps.steps_of(chunks_of(made.kmap, 8), limits_of(5, 8))
    assert bool(found.batches) == bool(as_on_a_gpu)


@pytest.mark.parametrize("layout", ["vio", "ovi"])
def test_weights_of_every_layout(layout):
    """Even kernels have no dense offset, and lists run backwards on the transposed side."""
    made = layer("submanifold", kernel=(3, 2, 3))
    x, weight = features(made.kmap.n_in, 4), features(18 * 4, 6, 2).view(18, 4, 6)
    given = weight
    if layout == "ovi":
        given = weight.permute(2, 0, 1).reshape(6, 3, 2, 3, 4).contiguous()
    given = given.detach().requires_grad_()
    y = functional.conv(x, given, None, made.kmap, layout=layout)
    dy = features(*y.shape, 3)
    y.backward(dy)
    want, _, dw = truth(made.pairs, x, weight, dy)
    assert_close(y, want)
    got = given.grad if layout == "vio" else given.grad.reshape(6, 18, 4).permute(1, 2, 0)
    assert_close(got, dw)


def test_all_lists_but_the_dense_one_in_one_product(as_on_a_gpu, monkeypatch):
    limited(monkeypatch, ALL)
    made = layer("submanifold", shape=(12, 12, 12), batch_size=1)
    x, weight = features(made.kmap.n_in, 8), features(27 * 8, 8, 2).view(27, 8, 8)
    height = max(len(rows) for v, (rows, _) in enumerate(made.pairs) if v != 13)
    host_products.height_of(1, weight[0])  # what its shape takes is tried once
    singles, mm = [], torch.mm
    monkeypatch.setattr(rocm, "cpu_mm", lambda *a, **o: singles.append(len(a[0])) or mm(*a, **o))
    per_offset.gather_matmul(made.kmap, x, weight, layout_of(weight, "vio"))
    n = made.kmap.n_in
    assert as_on_a_gpu == [((26, height, 8), (26, 8, 8))] and singles == [n - n % 16, 16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_run_has_the_same_bits(dtype, sums):
    def run():
        made = layer("submanifold", shape=(10, 9, 8))
        x, dy = (features(made.kmap.n_in, 7, seed, dtype) for seed in (0, 1))
        return computed(made.kmap, x, features(27 * 7, 7, 2, dtype).view(27, 7, 7), dy)

    first, second = run(), run()
    for got, want in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(got, want)


def test_padding_is_not_read(sums, monkeypatch):
    """It repeats rows: here infinite ones, which are nobody else's business."""
    limited(monkeypatch, ALL)
    kmap, pairs = by_hand([3, 9, 10])
    x, dy, weight = features(40, 4), features(30, 5, 1), features(12, 5, 2).view(3, 4, 5)
    x[pairs[0][0][-1]], dy[pairs[1][1][-1]] = torch.inf, torch.inf
    together, apart = computed(kmap, x, weight, dy)
    want = truth(pairs, x, weight, dy)
    for got, exact in zip((*together, *apart), (*want, *want[1:]), strict=True):
        assert torch.equal(got.isfinite(), exact.isfinite())
        finite = exact.isfinite()
        assert_close(got[finite], exact[finite])


def test_lists_in_pieces(as_on_a_gpu, monkeypatch):
    """Long lists are cut, and parts hold few pairs: no batch has an offset twice."""
    monkeypatch.setattr(chunks, "_MOST", 60)
    monkeypatch.setattr(chunks, "_LONGEST", 20)
    limited(monkeypatch, Limits(0.5, 19, 1 << 20, 2))
    kmap, pairs = by_hand([25, 7, 30, 8, 9, 6, 20, 5, 5])
    found = steps.steps_of(chunks_of(kmap, 4), per_offset.limits_of(4, 4))
    assert len(found.batches) > 1 and len(found.alone) >= 3
    for batch in found.batches:
        assert len(batch.offset_indices(9, False).unique()) == len(batch)
    x, dy, weight = features(40, 4), features(30, 5, 1), features(36, 5, 2).view(9, 4, 5)
    together, apart = computed(kmap, x, weight, dy)
    want = truth(pairs, x, weight, dy)
    for got, exact in zip((*together, *apart), (*want, *want[1:]), strict=True):
        assert_close(got, exact)
    assert as_on_a_gpu


def test_whatever_the_default_device_is():
    made = layer("strided", shape=(9, 9, 9), batch_size=1)
    x, weight = features(made.kmap.n_in, 4), features(27 * 4, 4, 2).view(27, 4, 4)
    with torch.device("meta"), torch.inference_mode():  # and whatever is kept serves training, too
        functional.conv(x, weight, None, made.kmap)
    check(made, 4, 4, CPU)


def test_memory_goes_with_the_map():
    """Without waiting for the collector of cycles: on a GPU it is large."""
    kmap, _ = by_hand([8, 9, 10])
    computed(kmap, features(40, 4), features(12, 5, 2).view(3, 4, 5), features(30, 5, 1))
    (batch,) = steps.steps_of(chunks_of(kmap, 5), limits_of(4, 5)).batches
    rows = [weakref.ref(tensor) for tensor in (batch.x_rows, batch.sums.order)]
    gc.disable()
    del kmap, batch
    left = [one() for one in rows]
    gc.enable()
    assert left == [None, None]


def test_rows_that_repeat_within_a_list(monkeypatch):
    """Irregular maps: their sums are in one order, too."""
    limited(monkeypatch, ALL)
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randint(0, 6, (20,), generator=generator) for _ in "xy") for _ in range(4)]
    given = PairLists(*(torch.cat(rows) for rows in zip(*pairs, strict=True)), list(range(0, 81, 20)), False)
    kmap = KernelMap(Rulebook(6, 6, 4, torch.device("cpu"), lists=given, regular=False))
    x, dy, weight = features(6, 4), features(6, 5, 1), features(16, 5, 2).view(4, 4, 5)
    together, apart = computed(kmap, x, weight, dy)
    want = truth(pairs, x, weight, dy)
    for got, exact in zip((*together, *apart), (*want, *want[1:]), strict=True):
        assert_close(got, exact)


@pytest.mark.sample(4)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_finite_differences(kind, groups, sums):
    made = layer(kind, 2, 3, shape=(4, 4), share=0.4, seed=6)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(made.x_coords), 4, dtype=torch.float64, generator=generator)
    weight = torch.randn(9, 4 // groups, 2, dtype=torch.float64, generator=generator)

    def run(x, weight):
        return functional.conv(x, weight, None, made.kmap, groups=groups)

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), weight.requires_grad_()))
