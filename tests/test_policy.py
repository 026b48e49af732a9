"""Attempts: on which occasions they are due, and what ends them."""

from __future__ import annotations

import copy
import pickle

import pytest

from sparse_bridge import policy
from sparse_bridge.policy import Attempts, Schedule


def due(attempts: Attempts, occasions: int) -> list[int]:
    """Numbers of those of the next occasions that are due."""
    return [number for number in range(1, occasions + 1) if attempts.due()]


@pytest.mark.parametrize(
    ("schedule", "occasions", "expected"),
    [
        (Schedule(), 5, [1, 2, 3, 4, 5]),
        (Schedule(skip_first=3), 6, [4, 5, 6]),
        (Schedule(always_until=0), 70, [1, 2, 4, 8, 16, 32, 64]),
        (Schedule(always_until=3), 33, [1, 2, 3, 4, 8, 16, 32]),
        (Schedule(skip_first=2, always_until=5), 35, [3, 4, 5, 6, 7, 10, 18, 34]),
        (Schedule(max_tries=4), 9, [1, 2, 3, 4]),
        (Schedule(skip_first=1, always_until=1, max_tries=3), 99, [2, 3, 5]),
        (policy.CAPTURE, 9, [7, 8, 9]),
        (policy.COMPARISONS, 999, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_due_occasions(schedule, occasions, expected):
    attempts = Attempts(schedule)
    assert due(attempts, occasions) == expected
    assert (attempts.occasions, attempts.tries) == (occasions, len(expected))
    assert attempts.over == (len(expected) == schedule.max_tries)


def test_more_and_more_occasions_pass_after_failures_in_a_row():
    attempts, passed = Attempts(Schedule(longest_wait=20)), []
    for _ in range(7):
        attempts.failed()
        waits = 0
        while not attempts.due():
            waits += 1
        passed.append(waits)
    assert passed == [2, 4, 8, 16, 20, 20, 20] and not attempts.over
    attempts.learn(True)
    attempts.failed()
    assert attempts.wait == 2, "they begin anew behind a success"


def test_prefetch_waits_for_a_thousand_inputs_at_most():
    attempts = Attempts(policy.PREFETCH)
    for failures in range(1, 40):
        attempts.failed()
        assert attempts.wait == min(1024, 2**failures) and attempts.failures == failures


def test_two_prefetches_at_once():
    """A success leaves the wait that a failure beside it has brought."""
    attempts = Attempts(policy.PREFETCH)
    assert due(attempts, 2) == [1, 2]
    attempts.learn(False)
    attempts.learn(True)
    assert (attempts.failures, attempts.wait) == (0, 2) and due(attempts, 4) == [3, 4]


def test_failures_in_a_row_end_it():
    attempts = Attempts(Schedule(failures=3))
    for success in (False, False, True, False, False):
        attempts.learn(success)
        assert not attempts.over and attempts.due()
    attempts.learn(False)
    assert attempts.over and attempts.failures == 3 and due(attempts, 5) == []
    attempts.learn(True)  # of an attempt that was under way
    assert not attempts.over and due(attempts, 2) == [1, 2]


def test_a_success_brings_no_more_attempts_than_there_are():
    attempts = Attempts(Schedule(max_tries=2, failures=2))
    assert due(attempts, 3) == [1, 2]
    attempts.failed()
    attempts.failed()
    attempts.learn(True)
    assert attempts.over and not attempts.due()


def test_give_up():
    attempts = Attempts(Schedule())
    assert attempts.due()
    attempts.give_up()
    assert attempts.over and due(attempts, 5) == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_go_on_for_themselves(copied):
    attempts = Attempts(Schedule(failures=2))
    attempts.failed()
    other = copied(attempts)
    other.failed()
    assert other.over and other.failures == 2 and not attempts.over and attempts.failures == 1


def test_all_numbers_are_positive():
    numbers = {name: one for name, one in vars(policy).items() if name.isupper()}
    assert len(numbers) > 25
    for name, one in numbers.items():
        assert min(one[1:4]) > 0 and one != Schedule() if isinstance(one, Schedule) else one > 0, name
