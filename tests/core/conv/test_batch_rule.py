"""Which offsets are multiplied together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bridge.core.conv import chunks
from sparse_bridge.core.conv.batches import rule
from sparse_bridge.core.conv.batches.rule import Limits, groups_of, limits_of

LIMITS = Limits(epsilon=0.4, longest=100, room=1000)


@pytest.mark.parametrize(
    "sizes, limits, groups",
    [
        # By size 2, 3, 9, 10, 10: 3 pads one of 6 rows, 9 would pad 13 of 27 (10.8 are allowed). The
        # first two are too few for a group; the others pad one of 30.
        ([0, 10, 3, 9, 500, 10, 2], LIMITS, [[1, 3, 5]]),
        ([0, 10, 3, 9, 500, 10, 2], LIMITS._replace(fewest=2), [[2, 6], [1, 3, 5]]),
        ([0, 10, 3, 9, 500, 10, 2], LIMITS._replace(epsilon=0.5), [[1, 2, 3, 5, 6]]),  # 13 of 27
        ([0, 10, 3, 9, 500, 10, 2], LIMITS._replace(epsilon=0.0), []),
        ([7] * 5, LIMITS._replace(epsilon=0.0), [[0, 1, 2, 3, 4]]),
        ([6, 10, 10], LIMITS, [[0, 1, 2]]),
        ([10, 3, 5], LIMITS, [[0, 1, 2]]),  # 12 of 30: just allowed
        ([10, 3, 4], LIMITS, []),  # 13 of 30, and two of them are too few
        ([100, 100, 100], LIMITS, [[0, 1, 2]]),
        ([101, 101, 101], LIMITS, []),
        ([50] * 8, LIMITS._replace(room=200), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([50] * 8, LIMITS._replace(room=199), [[0, 1, 2], [3, 4, 5]]),
        ([], LIMITS, []),
        ([0, 0, 0], LIMITS, []),
        ([1], LIMITS, []),
        ([1, 1, 1], LIMITS, [[0, 1, 2]]),
    ],
)
def test_groups_by_hand(sizes, limits, groups):
    assert groups_of(sizes, limits) == groups


def test_limits_by_hand():
    assert limits_of(64, 64) == Limits(rule.EPSILON, 16384, 65536, rule.FEWEST)
    assert limits_of(33, 32) == limits_of(64, 64)
    assert limits_of(512, 512).longest == 2048
    assert limits_of(3, 5).longest == rule._LONGEST < chunks._LONGEST, "no offset twice in a group"


@given(
    st.lists(st.integers(0, 200), max_size=40),
    st.floats(0, 0.9),
    st.integers(0, 150),
    st.integers(0, 2000),
    st.integers(1, 4),
)
def test_every_group_is_within_the_limits(sizes, epsilon, longest, room, fewest):
    groups = groups_of(sizes, Limits(epsilon, longest, room, fewest))
    places = [place for group in groups for place in group]
    assert len(set(places)) == len(places)
    assert all(group == sorted(group) for group in groups)
    for group, after in itertools.pairwise(groups):
        assert max(sizes[place] for place in group) <= min(sizes[place] for place in after)
    for group in groups:
        own = [sizes[place] for place in group]
        padded = len(own) * max(own)
        assert len(own) >= fewest and min(own) > 0 and max(own) <= longest
        assert len(own) == 1 or padded <= room
        assert padded - sum(own) <= epsilon * padded


@given(st.lists(st.integers(0, 1 << 15), max_size=40), st.sampled_from([8, 64, 500]))
def test_no_group_costs_more_than_the_calls_it_saves(sizes, channels):
    """S pairs cost what the three calls of a list do; a group has five."""
    limits = limits_of(channels, channels)
    for group in groups_of(sizes, limits):
        own = [sizes[place] for place in group]
        redundant = len(own) * max(own) - sum(own)
        assert 3 * redundant / limits.longest <= 3 * len(own) - 5
