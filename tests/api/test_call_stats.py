from __future__ import annotations

import json
import threading

import pytest

from sparse_bridge.adapters import call_stats
from sparse_bridge.adapters.base import FrameworkStatus
from sparse_bridge.adapters.call_stats import LayerCount, Report, Statuses
from sparse_bridge.adapters.ways import MapCount
from sparse_bridge.errors import UnsupportedError
from tests.walk import walk


@pytest.fixture(autouse=True)
def clean():
    call_stats.reset()
    yield
    call_stats.reset()
    call_stats.set_strict("f", None)


def test_counts_by_framework_layer_and_reason():
    for reason in (None, "groups=2", None, "groups=2", "complex"):
        call_stats.note("f", "Conv", reason)
    call_stats.note("f", "Pool")
    conv = LayerCount(2, {"groups=2": 2, "complex": 1})
    assert call_stats.counts() == {"f": {"Conv": conv, "Pool": LayerCount(1, {})}}


def test_since_survives_a_reset():
    call_stats.note("f", "Conv")
    call_stats.note("f", "Conv")
    before = call_stats.snapshot()
    call_stats.note("f", "Pool")
    assert call_stats.since(before) == {("f", "Pool", None): 1}
    call_stats.reset()
    call_stats.note("f", "Conv")
    assert call_stats.since(before) == {("f", "Conv", None): 1}


def test_strict_refuses_and_does_not_count():
    call_stats.set_strict("f", True)
    call_stats.note("f", "Conv")
    with pytest.raises(UnsupportedError, match=r"f Conv .*groups=2.*strict=False"):
        call_stats.note("f", "Conv", "groups=2")
    call_stats.note("g", "Conv", "groups=2")
    assert call_stats.counts()["f"]["Conv"] == LayerCount(1, {})


def test_a_note_is_cheap():
    call_stats.note("f", "Conv")
    seen = walk(lambda: call_stats.note("f", "Conv"))
    assert seen.files == ["adapters/call_stats.py"] and seen.called == 1


def test_the_report_is_a_table():
    layers = {"f": {"Conv": LayerCount(18, {"groups=2": 1}), "MaxPool": LayerCount(4, {})}}
    assert str(Report((), layers, {}, (), maps=MapCount(), ways=())).splitlines() == [
        "framework  layer    bridged  original  why original",
        "f          Conv          18         1  groups=2 (1)",
        "f          MaxPool        4         0",
    ]
    assert str(Report((), {}, {}, (), maps=MapCount(), ways=())) == "no layer has run"
    counted = Report((), {}, {}, (), maps=MapCount(7, 1, 2), ways=("a way",))
    assert str(counted).splitlines() == [
        "no layer has run",
        "maps of 7 inputs prefetched; of 1 queued again, as bounds had grown; of 2 dropped and built one by one",
        "a way",
    ]


def test_statuses_and_reports_are_tables_in_a_notebook(tmp_path):
    status = FrameworkStatus("f", True, "patch", "1.0", "a <reason>", "masked", "cpu", ("a note",))
    statuses = Statuses({"f": status})
    assert statuses == {"f": status} and statuses["f"] is status
    assert repr(statuses).splitlines() == ["f 1.0: patch (a <reason>)", "  masked dataflow on cpu", "  a note"]
    assert "a &lt;reason&gt;" in statuses._repr_html_()
    assert json.loads(json.dumps(statuses.to_dict()))["f"]["notes"] == ["a note"]
    report = Report((status,), {"f": {"Conv": LayerCount(18, {"groups=2": 1})}}, {"masked": {"C": 2}})
    page = report._repr_html_()
    assert page.count("<table>") == 2 and "groups=2 (1)" in page
    assert "masked dataflow given to 2 C" in page
    text = report.to_json(tmp_path / "report.json")
    assert json.loads(text)["layers"]["f"]["Conv"]["bridged"] == 18
    assert (tmp_path / "report.json").read_text() == text + "\n"
    assert "no layer has run" in Report((), {})._repr_html_()


def test_calls_are_heard_by_their_own_thread_alone():
    with call_stats.listen() as mine, call_stats.listen() as also:
        call_stats.note("f", "Conv", "groups=2")
        other = threading.Thread(target=call_stats.note, args=("f", "Pool"))
        other.start()
        other.join()
    call_stats.note("f", "Conv")
    assert mine == also == [("f", "Conv", "groups=2")]


def test_a_report_reads_the_same_in_a_terminal_and_in_print():
    layers = {"spconv": {"SubMConv3d": LayerCount(18, {})}}
    used = FrameworkStatus("spconv", True, "standin", "2.3.8", "absent", "per_offset", "cpu")
    idle = [
        FrameworkStatus(name, True, "standin", "1", "absent", "per_offset", "cpu", imported=False)
        for name in ("torchsparse", "minkowski")
    ]
    report = Report((used, *idle), layers)
    lines = repr(report).splitlines()
    assert repr(report) == str(report) and lines[0].startswith("spconv 2.3.8: standin")
    assert "enabled, not imported: torchsparse, minkowski" in lines
    assert sum("torchsparse" in line for line in lines) == 1, "a line for all of them"
    page = report._repr_html_()
    assert page.count("minkowski") == 1 and "enabled, not imported: torchsparse, minkowski" in page
    assert [one["imported"] for one in report.to_dict()["frameworks"]] == [True, False, False]
    # A child process may have imported what this one has not.
    counted = Report((*idle,), {"minkowski": {"Conv": LayerCount(1, {})}})
    assert "not imported: torchsparse\n" in str(counted) and "minkowski 1: standin" in str(counted)
