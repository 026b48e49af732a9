"""Every suite names its cases, and the command line's choices narrow them."""

import dataclasses

import pytest

from benchmarks.peers import NETWORKS
from benchmarks.registry import DTYPES, SUITES, WORKS, Case, Selection, enumerate_cases
from sparse_bridge.errors import SettingError
from sparse_bridge.tools.networks.torchsparse import BACKBONES

SCANS = ("street", "/data/second_scan.npz")


def selection(*suites, **more):
    chosen = {"scans": SCANS, "dtypes": ("fp16",), "device": "cuda", **more}
    return Selection(suites=suites or SUITES, **chosen)


def test_every_suite_has_cases_with_names_of_their_own():
    cases = enumerate_cases(selection(dtypes=DTYPES))
    assert {case.suite for case in cases} == set(SUITES)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.work in WORKS
        assert bool(case.channels) != bool(case.network)
        assert not case.network or case.network in (*NETWORKS, *BACKBONES)
        assert Case(**dataclasses.asdict(case)) == case  # the form in which it travels
        assert "/data" not in case.name


def test_targets_are_covered():
    layers = enumerate_cases(selection("layers"))
    first = [case for case in layers if case.scene == "street"]
    assert {case.channels for case in first} == {16, 32, 64, 128, 256}
    assert {case.work for case in first} == {"forward", "fresh", "train"}
    assert any(case.batch == 8 for case in layers)
    shells = {(case.source, case.channels) for case in enumerate_cases(selection("shells"))}
    assert {("shell:16", 1024), ("shell:256", 256), ("shell:1024", 64)} <= shells
    networks = {(c.network, c.work) for c in enumerate_cases(selection("networks"))}
    assert {("second", "infer"), ("unet", "infer"), ("unet", "step")} <= networks


def test_scale_reaches_beyond_32_bit_offsets():
    cases = enumerate_cases(selection("scale"))
    rows = {int(case.source.split(":")[1]) for case in cases}
    assert min(rows) == 1000 and max(rows) == 8_000_000
    elements = [int(case.source.split(":")[1]) * case.channels for case in cases]
    assert max(elements) > 2**31


def test_cpu_cases_stay_on_the_cpu_and_autocast_needs_a_short_dtype():
    cases = enumerate_cases(selection("cpu", "networks", dtypes=("fp32",), threads=(3,)))
    assert {case.device for case in cases if case.suite == "cpu"} == {"cpu"}
    assert {case.threads for case in cases if case.suite == "cpu"} == {3}
    assert {case.device for case in cases if case.suite == "networks"} == {"cuda"}
    assert not any(case.work == "autocast" for case in cases)


def test_the_cpu_suite_has_layers_and_networks():
    cases = enumerate_cases(selection("cpu", threads=(1, 2)))
    layers = {(case.channels, case.work, case.threads) for case in cases if not case.network}
    assert {(16, "fresh", 1), (128, "train", 2)} <= layers
    assert {case.work for case in cases if case.source == "sheet:500"} == {"fresh"}
    assert {case.network for case in cases} == {"", "second", "unet"}


def test_backbones_run_alone_and_in_a_stream_beside_second():
    cases = enumerate_cases(selection("backbones"))
    for work in ("infer", "stream"):
        found = {case.network for case in cases if case.work.startswith(work)}
        assert found == {"second", *BACKBONES}
    assert {case.source for case in cases if case.streams} == {"+".join(SCANS)}


def test_patterns_select_by_name():
    cases = enumerate_cases(selection("layers", patterns=("*/c64/*", "layers/street/c16/*/fresh")))
    assert {case.channels for case in cases} == {16, 64}
    assert [case.work for case in cases if case.channels == 16] == ["fresh"]


@pytest.mark.parametrize("wrong", [{"suites": ("layer",)}, {"dtypes": ("fp8",)}, {"patterns": ("nothing*",)}])
def test_what_does_not_exist_is_an_error(wrong):
    with pytest.raises(SettingError, match="expected"):
        enumerate_cases(dataclasses.replace(selection("layers"), **wrong))
