"""Graph convolution on relations against sums over edges in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge import errors
from sparse_bridge.core import functional
from sparse_bridge.core.device import trace
from sparse_bridge.core.maps.entry_sums import EntrySums
from sparse_bridge.core.ops import relational
from sparse_bridge.kernels.gemm import grouped_gemm
from tests.checks import assert_close, assert_error
from tests.clouds import features

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


def graph(n_in=40, n_out=30, n_edges=200, n_relations=5, seed=0, once=False):
    """(edge_index, edge_type): crowded targets and relations of very different sizes; once: no two
    edges of one relation meet in a node."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, n_in, (n_edges,), generator=generator)
    target = (torch.rand(n_edges, generator=generator) ** 3 * n_out).long()
    kind = (torch.rand(n_edges, generator=generator) ** 2 * n_relations).long()
    if once:
        key = torch.unique(kind * n_out + target)
        key = key[torch.randperm(len(key), generator=generator)]
        source, target, kind = source[: len(key)], key % n_out, key // n_out
    return torch.stack([source, target]), kind


def truth(x, weight, edge_index, edge_type, n_out, aggr="mean"):
    """Edge by edge; weight [R, C_in, C_out] or block-diagonal."""
    if weight.ndim == 4:
        weight = torch.stack([torch.block_diag(*blocks) for blocks in weight])
    nothing = 0 * weight.sum() + 0 * x.sum()  # so that gradients exist without edges, too
    y = torch.zeros(n_out, weight.shape[2], dtype=torch.float64) + nothing
    keys = [*zip(edge_type.tolist(), edge_index[1].tolist(), strict=True)]
    for (r, i), j in zip(keys, edge_index[0].tolist(), strict=True):
        share = 1 / keys.count((r, i)) if aggr == "mean" else 1
        row = weight[r, x[j]] if x.ndim == 1 else x[j] @ weight[r]
        y = y.index_add(0, torch.tensor([i]), share * row.unsqueeze(0))
    return y


def compare(lane, edges, x, weight, n_out, *, aggr="mean", dtype=torch.float32, residual=None):
    """Forward and all gradients; rows repeat bit by bit."""
    relations = functional.relation_map(edges[0].to(lane.device), edges[1].to(lane.device), len(weight), n_out, len(x))
    wanted = [x, weight] if x.is_floating_point() else [weight]
    dy = features(n_out, weight.shape[-1] * (weight.shape[1] if weight.ndim == 4 else 1), 9, dtype)
    added = [] if residual is None else [residual]
    runs = []
    for _ in range(2):
        leaves = [t.detach().clone().to(lane.device).requires_grad_(t.is_floating_point()) for t in (x, weight)]
        more = [t.detach().clone().to(lane.device).requires_grad_() for t in added]
        with lane.serving(dtype):
            y = functional.relational_conv(*leaves, relations, aggr=aggr, residual=more[0] if more else None)
            y.backward(dy.to(lane.device))
        runs.append([y.detach(), *(t.grad for t in (*leaves, *more) if t.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    exact = [t.detach().double().requires_grad_() for t in (*wanted, *added)]
    operands = exact if x.is_floating_point() else [x, *exact]
    want = truth(*operands[:2], *edges, n_out, aggr)
    want = want + exact[-1] if added else want
    want.backward(dy.double())
    for got, truth_ in zip(runs[0], [want.detach(), *(t.grad for t in exact)], strict=True):
        assert_close(got, truth_, dtype)
    return y


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_means_and_sums(map_lane, aggr, once):
    edges = graph(once=once)
    x, weight = features(40, 17), features(5 * 17, 9, 1).view(5, 17, 9)
    with trace.record() as events:
        compare(map_lane, edges, x, weight, 30, aggr=aggr)
    flow = "grouped" if map_lane.kernels else "per_offset"
    assert {event.dataflow for event in events} == {flow}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(map_lane, dtype):
    x, weight = features(40, 16, dtype=dtype), features(80, 24, 1, dtype).view(5, 16, 24)
    compare(map_lane, graph(), x, weight, 30, dtype=dtype)


@pytest.mark.parametrize("once", [False, True])
def test_blocks(map_lane, once):
    weight = features(5 * 3 * 4, 5, 1).view(5, 3, 4, 5)
    compare(map_lane, graph(once=once), features(40, 12), weight, 30)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_numbers_of_nodes(map_lane, aggr):
    """One-hot features: rows of the weight are looked up."""
    nodes = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(4))
    compare(map_lane, graph(), nodes, features(250, 8, 1).view(5, 50, 8), 30, aggr=aggr)


def test_a_residual(map_lane):
    x, weight = features(40, 16), features(80, 8, 1).view(5, 16, 8)
    y = compare(map_lane, graph(), x, weight, 30, residual=features(30, 8, 3))
    relations = functional.relation_map(*(t.to(y.device) for t in graph()), 5, 30, 40)
    with torch.no_grad():
        args = x.to(y.device), weight.to(y.device), relations
        fused = functional.relational_conv(*args, residual=features(30, 8, 3).to(y.device))
    assert_close(fused, y.detach().double().cpu())


def test_nodes_that_nearly_every_edge_meets(map_lane, rules):
    """Long rows are added up in pieces, forward and backward."""
    rules.set(grouped_gemm, LONGEST=8, _PIECE=4)
    edge_index, kind = graph(n_edges=300)
    edge_index[0, ::2], edge_index[1, 1::2] = 7, 3
    for edges in ((edge_index, kind), (edge_index.flip(0), kind)):
        for dtype in (torch.float16, torch.float32):
            x, weight = features(40, 16, dtype=dtype), features(80, 8, 1, dtype).view(5, 16, 8)
            compare(map_lane, edges, x, weight, 40, dtype=dtype)


@pytest.mark.parametrize("once", [False, True])
def test_inference_in_parts(map_lane, rules, once):
    """Ranges of target nodes one after another, where a whole graph's products take much memory."""
    edges = graph(once=once)
    x, weight = features(40, 16), features(80, 8, 1).view(5, 16, 8)
    relations = functional.relation_map(*(t.to(map_lane.device) for t in edges), 5, 30, 40)
    placed = x.to(map_lane.device), weight.to(map_lane.device), relations
    residual = features(30, 8, 3).to(map_lane.device)
    rules.set(relational, _WORKSPACE=4 * (16 + 8) * 20)
    with trace.record() as events:
        y = functional.relational_conv(*placed, residual=residual)
        functional.relational_conv(*placed)
    assert len(events) >= 6
    want = truth(x.double(), weight.double(), *edges, 30) + residual.double().cpu()
    assert_close(y, want)
    ranges = [rows for rows, _ in relations.parts(4)]
    assert ranges[0].start == 0 and ranges[-1].stop == 30
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("n_edges", [0, 1])
def test_few_edges(map_lane, n_edges):
    edge_index, kind = torch.tensor([[3], [2]]), torch.tensor([4])
    edges = edge_index[:, :n_edges], kind[:n_edges]
    compare(map_lane, edges, features(40, 16), features(80, 8, 1).view(5, 16, 8), 30)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_of_either_width(map_lane, dtype):
    edges = [t.to(dtype) for t in graph()]
    compare(map_lane, edges, features(40, 16), features(80, 8, 1).view(5, 16, 8), 30)


def test_gradients_in_fp64():
    relations = functional.relation_map(*graph(8, 6, 30, 3), 3, 6, 8)
    x = features(8, 4, dtype=torch.float64).requires_grad_()
    weight = features(12, 5, 1, torch.float64).view(3, 4, 5).requires_grad_()
    run = lambda a, b: functional.relational_conv(a, b, relations)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, weight))


def test_sums_without_entries_are_zero(map_lane):
    starts = torch.tensor([0, 0, 2, 2], dtype=torch.int32, device=map_lane.device)
    columns = torch.tensor([1, 1], device=map_lane.device)
    sums = EntrySums(columns, starts, 3, mean=True)
    x = features(3, 5, device=map_lane.device)
    want = torch.zeros(3, 5)
    want[1] = x[1].cpu()
    assert torch.equal(sums.product(x).cpu(), want)
    assert sums.transposed().transposed() is sums


@pytest.mark.parametrize(
    "change, kind, words",
    [
        ({"edge_index": torch.zeros(3, 4, dtype=torch.int64)}, errors.ShapeError, ["[3, 4]", "[2, E]"]),
        ({"edge_type": torch.zeros(5, dtype=torch.int64)}, errors.ShapeError, ["[5]", "[4]"]),
        ({"edge_type": torch.zeros(4)}, errors.DataTypeError, ["edge_type", "float32", "int32"]),
        ({"edge_index": torch.full((2, 4), 9)}, errors.CoordinateError, ["source node 9", "< 6"]),
        ({"edge_index": torch.tensor([[0] * 4, [-1] * 4])}, errors.CoordinateError, ["target node -1"]),
        ({"edge_type": torch.full((4,), 2)}, errors.CoordinateError, ["relation 2", "< 2"]),
        ({"n_relations": 0}, errors.ShapeError, ["0 relations", "at least one"]),
    ],
    ids=str,
)
def test_bad_edges(change, kind, words):
    given = {
        "edge_index": torch.zeros(2, 4, dtype=torch.int64),
        "edge_type": torch.zeros(4).long(),
        "n_relations": 2,
        "n_out": 5,
        "n_in": 6,
    }
    assert_error(lambda: functional.relation_map(**{**given, **change}), kind, words)


@pytest.mark.parametrize(
    "x, weight, options, kind, words",
    [
        (torch.ones(6, 3), torch.ones(2, 4, 4), {}, errors.ShapeError, ["3 channels", "expects 4"]),
        (torch.ones(5, 4), torch.ones(2, 4, 4), {}, errors.ShapeError, ["[5, 4]", "[6, C_in]"]),
        (torch.ones(6, 4), torch.ones(3, 4, 4), {}, errors.ShapeError, ["[3, 4, 4]", "[2, C_in"]),
        (torch.ones(6, 4), torch.ones(2, 4, 4), {"aggr": "max"}, errors.UnsupportedError, ["'max'"]),
        (torch.full((6,), 4), torch.ones(2, 4, 4), {}, errors.CoordinateError, ["node 4", "< 4"]),
        (torch.zeros(6).long(), torch.ones(2, 2, 2, 2), {}, errors.UnsupportedError, ["block"]),
    ],
    ids=str,
)
def test_bad_features(x, weight, options, kind, words):
    relations = functional.relation_map(torch.zeros(2, 4).long(), torch.zeros(4).long(), 2, 5, 6)
    assert_error(lambda: functional.relational_conv(x, weight, relations, **options), kind, words)
