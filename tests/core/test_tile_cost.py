"""The cost model that picks the tiles to time."""

from __future__ import annotations

import pytest

from sparse_bridge.core.tuning import cost
from tests.core.tuning import problem, tile

pytest.importorskip("triton")


def test_the_cost_model_prefers_what_wastes_less():
    def order(one, *tiles, live=None):
        visits = live or (lambda block_m: 27 * -(-one.n_rows // block_m))
        return sorted(tiles, key=lambda t: cost.predicted(one, t, visits))

    wide, narrow = tile(block_n=128), tile(block_n=32)
    assert order(problem(c_out=32), wide, narrow) == [narrow, wide], "half of 128 columns is idle"
    assert order(problem(c_out=128), wide, narrow) == [wide, narrow], "rows are gathered once"
    few = problem(n_rows=800, n_in=800, c=512)
    assert order(few, wide, narrow) == [narrow, wide], "52 programs leave 132 units idle"
    deep, shallow = tile(block_k=128), tile(block_k=16)
    assert order(problem(c=128), shallow, deep) == [deep, shallow], "fewer steps"
    tall, low = tile(block_m=128), tile(block_m=64)
    redundant = {64: 10_000, 128: 10_000}
    assert order(problem(), tall, low, live=redundant.get) == [low, tall]
    one = problem("wgrad", c_in=16, c_out=16)
    small, large = tile(16, 16, 64), tile(128, 128, 64)
    assert order(one, large, small) == [small, large]


def test_the_shortlist_holds_the_default_and_the_most_promising():
    one = problem(c=256)
    calls = []

    def live(block_m):
        calls.append(block_m)
        return 27 * -(-one.n_rows // block_m)

    found = cost.shortlist(one, live, 4)
    costs = [cost.predicted(one, t, live) for t in found[1:]]
    assert found[0] == one.default() and len(found) == len(set(found)) == 4
    assert costs == sorted(costs)
    rest = set(one.candidates()) - set(found)
    assert rest and min(cost.predicted(one, t, live) for t in rest) >= costs[-1]


def test_mask_splits_cost_their_partial_sums():
    """Less work has to make up for the traffic."""
    one = problem(dataflow="masked", c=512, n_rows=200, n_in=200)
    assert one._replace(dataflow="masked:2").splits == 2
    assert one._replace(dataflow="masked:4", n_offsets=3).splits == 3
    many = problem(dataflow="masked", c=64)

    def costs(splits, visits):
        one = many if splits == 1 else many._replace(dataflow=f"masked:{splits}")
        return cost.predicted(one, tile(), lambda _: visits)

    visits = int(1.5 * 3 * many.n_rows / 64)
    assert costs(1, visits) < costs(2, visits) < costs(4, visits)
    assert costs(2, visits // 10) < costs(1, 10 * visits)
