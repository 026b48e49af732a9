"""A test over many values tells of every one that fails, and of no other."""

from __future__ import annotations

import pytest

from tests.each import each_of


def test_every_value_that_fails_is_named():
    def check(value):
        """No number above two."""
        assert value <= 2

    each_of([1, 2])(check)()
    with pytest.raises(pytest.fail.Exception, match=r"No number above two\.\n<4>: AssertionError: .*4") as failed:
        each_of([1, 4, 2, 3], "<{}>".format)(check)()
    assert "\n<3>: " in str(failed.value) and "<1>" not in str(failed.value) and "<2>" not in str(failed.value)


def test_errors_count_and_nothing_is_passed_over():
    with pytest.raises(pytest.fail.Exception, match="0: ZeroDivisionError"):
        each_of([1, 0])(lambda value: 1 / value)()
    with pytest.raises(AssertionError, match="1: return instead of a skip"):
        each_of([1])(lambda value: pytest.skip("not here"))()
    with pytest.raises(AssertionError, match="nothing to look at"):
        each_of([])(lambda value: None)()
