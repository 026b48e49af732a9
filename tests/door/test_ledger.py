from __future__ import annotations

import timeit

import pytest

from sparse_bridge.adapters import ledger
from sparse_bridge.adapters.ledger import LayerCount, Report
from sparse_bridge.errors import UnsupportedError


@pytest.fixture(autouse=True)
def clean():
    ledger.reset()
    yield
    ledger.reset()
    ledger.set_strict("f", None)


def test_counts_by_framework_layer_and_reason():
    for reason in (None, "groups=2", None, "groups=2", "complex"):
        ledger.note("f", "Conv", reason)
    ledger.note("f", "Pool")
    assert ledger.counts() == {
        "f": {
            "Conv": LayerCount(2, {"groups=2": 2, "complex": 1}),
            "Pool": LayerCount(1, {}),
        }
    }


def test_since_survives_a_reset():
    ledger.note("f", "Conv")
    ledger.note("f", "Conv")
    before = ledger.snapshot()
    ledger.note("f", "Pool")
    assert ledger.since(before) == {("f", "Pool", None): 1}
    ledger.reset()
    ledger.note("f", "Conv")
    assert ledger.since(before) == {("f", "Conv", None): 1}


def test_strict_refuses_and_does_not_count():
    ledger.set_strict("f", True)
    ledger.note("f", "Conv")
    with pytest.raises(UnsupportedError, match=r"f Conv .*groups=2.*strict=False"):
        ledger.note("f", "Conv", "groups=2")
    ledger.note("g", "Conv", "groups=2")
    assert ledger.counts()["f"]["Conv"] == LayerCount(1, {})


def test_a_note_is_cheap():
    per_call = min(timeit.repeat(lambda: ledger.note("f", "Conv"), number=2000, repeat=5)) / 2000
    assert per_call < 10e-6


def test_the_report_is_a_table():
    layers = {"f": {"Conv": LayerCount(18, {"groups=2": 1}), "MaxPool": LayerCount(4, {})}}
    assert str(Report((), layers)).splitlines() == [
        "framework  layer    bridged  original  why original",
        "f          Conv          18         1  groups=2 (1)",
        "f          MaxPool        4         0",
    ]
    assert str(Report((), {})) == "no layer has run"
