"""Figures of the pages are those of records, and of one another."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from benchmarks.headline import details, facts, headline, write_into
from benchmarks.memory_report import limits_table
from benchmarks.results import load_run
from benchmarks.scale_out import tables
from sparse_bridge.errors import ShapeError
from sparse_bridge.kernels.runtime.architectures import compiled
from sparse_bridge.kernels.runtime.target import described

from .pages import PAGES, ROOT, name_of, prose, table

RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "h200_stream_default.json"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_the_speed_table_is_the_records(page: str) -> None:
    run = load_run(RECORD)
    table = headline(run)
    assert len(table.splitlines()) > 4
    assert table in read(page)
    assert facts(run) in read(page)
    assert page == "README.md" or details(run) in read(page)


def test_no_other_figure_of_speed_stands_in_the_readme() -> None:
    text = read("README.md").replace(headline(load_run(RECORD)), "")
    assert not re.findall(r"\d+(?:\.\d+)? ?(?:ms|us|GB|MB|x|times|%)\b", text)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("throughput", "scale_out_h200"),
        ("throughput", "scale_out_h200_x2"),
        ("first_step", "scale_out_h200"),
        ("curves", "scale_out_h200"),
        ("curves", "scale_out_cpu"),
    ],
)
def test_the_tables_of_several_ranks_are_the_records(part: str, name: str) -> None:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    found = tables.table(part, record["parts"][part])
    assert len(record["parts"][part]) > 2
    assert found in read("docs/scale_out.md")


def test_a_new_record_is_written_into_the_pages(tmp_path) -> None:
    page, run = tmp_path / "page.md", load_run(RECORD)
    shown = read("docs/speed.md")
    page.write_text(shown, encoding="utf-8")
    run.machine["commit"] = "0000000"
    for figure in run.figures:
        figure.rounds = [2 * value if figure.peer == "spconv" else value for value in figure.rounds]
        figure.ms = figure.ms and figure.ms + 1
    write_into(page, run)
    written = page.read_text(encoding="utf-8")
    assert headline(run) in written and details(run) in written and facts(run) in written
    write_into(page, load_run(RECORD))
    assert page.read_text(encoding="utf-8") == shown
    page.write_text("# A page\n", encoding="utf-8")
    with pytest.raises(ShapeError, match="no table of streams"):
        write_into(page, run)


STREAMS = {
    "U-Net, inference": "cm/unet/fp16/stream",
    "U-Net, training step": "cm/unet/fp16/stream-step",
    "SECOND, inference": "second/fp16/stream-fixed",
    "SECOND, training step": "second/fp16/stream-fixed-step",
}
COLD = {"SECOND, inference": "cold-infer", "SECOND, training step": "cold-step"}


def test_first_calls_are_those_of_records() -> None:
    def first(record: str, case: str, peer: str) -> str:
        run = load_run(RESULTS / f"{record}.json")
        (one,) = (one for one in run.figures if one.case.endswith(case) and one.peer == peer)
        seconds = one.ms / 1e3 if one.suite == "cold" and one.ms else one.first_s
        return f"{seconds:.1f}"

    page, peers = ROOT / "docs" / "costs.md", ("bridge", "spconv")
    columns = {
        "h200_stream_default": "H200, b625a82e, 30 November",
        "h100_stream": "H100, a4fc180, 26 November",
        "h200_stream": "H200, 24111a7, 25 November",
    }
    head = "".join(f"| {column} | spconv " for column in columns.values())
    assert table(page, f"| first call, s {head}|") == [
        [words, *(first(record, case, peer) for record in columns for peer in peers)] for words, case in STREAMS.items()
    ]
    head = "| first call of a process, s | nothing compiled | spconv | kernels on disk | spconv |"
    assert table(page, head) == [
        [words, *(first("h200_cold_fp16", case + again, peer) for again in ("", "-again") for peer in peers)]
        for words, case in COLD.items()
    ]


def test_the_memory_of_a_replayed_network_is_that_of_the_record() -> None:
    run = load_run(RECORD)
    figures = {one.peer: one for one in run.figures if one.case.endswith(STREAMS["U-Net, inference"])}
    ours, theirs = (round(figures[peer].peak_mb + figures[peer].held_mb) for peer in ("bridge", "spconv"))
    said = f"peak and what is kept come to {ours} MB, spconv's to {theirs} "
    page = " ".join(read("docs/costs.md").split())
    assert said in page and f"at commit {run.machine['commit']})" in page


# Rows of the memory table in docs/speed.md: suite of the records, peer, words.
MEMORY = {
    ("networks", "bridge"): "one scene again and again, networks",
    ("layers", "bridge"): "single layers, LiDAR scenes",
    ("scale", "bridge"): "single layers, sheets of 1k to 8M voxels",
    ("shells", "bridge"): "single layers, shells, up to 1024 channels",
    ("networks", "bridge_replayed"): "networks, `optimize(model, graphs=True)`",
}


def test_the_memory_table_is_that_of_all_records() -> None:
    ratios: dict[tuple[str, str], list[float]] = {}
    for path in sorted(RECORD.parent.glob("h200_*.json")):
        for one in load_run(path).comparisons():
            for other in one.others:
                ratio = one.memory(other)
                if ratio:  # 0: nothing was allocated beyond what was there, not a size
                    ratios.setdefault((one.base.suite, other.peer), []).append(ratio)
    page = read("docs/speed.md")
    for key, words in MEMORY.items():
        found = ratios[key]
        figures = (min(found), statistics.median(found), max(found))
        row = " | ".join([words, str(len(found)), *(f"{value:.2f}" for value in figures)])
        assert f"| {row} |" in page, f"expected the row: | {row} |"


# Tables of ratios in docs/speed.md: first line, the columns as (record, part of the case), and the
# rows as (words, case, peer).
NETWORKS = [
    (f"{words}, {what}{how}", (subject, work), peer)
    for peer, how, cases in (
        ("bridge", "", ("second infer", "second step", "unet infer", "unet step")),
        ("bridge_optimized", ", `optimize(model)`", ("unet infer",)),
        ("bridge_replayed", ", with graphs", ("second infer", "second step", "unet infer", "unet step")),
    )
    for subject, work in map(str.split, cases)
    for words, what in [
        ({"second": "SECOND", "unet": "U-Net"}[subject], {"infer": "inference", "step": "training step"}[work])
    ]
]
THREADS = [(words, case, "bridge") for words, case, peer in NETWORKS if peer == "bridge"]
XEON = [
    ("SECOND", ("second-t1", ""), "bridge"),
    ("U-Net", ("unet-t1", ""), "bridge"),
    ("one submanifold layer, C = 16", ("c16-t1", ""), "bridge"),
    *((f"C = {width}", (f"c{width}-t1", ""), "bridge") for width in (32, 64, 128)),
]
TABLES = {
    "| | 18k voxels | 72k (batch of 4) | 94k | 378k (batch of 4) |": (
        [
            ("h200_networks_fp16", "nuscenes"),
            ("h200_networks_72k_fp16", "nuscenes"),
            ("h200_networks_fp16", "semantickitti"),
            ("h200_networks_378k_fp16", "semantickitti"),
        ],
        NETWORKS,
    ),
    "| | 1 thread | 2 threads |": ([("cpu_epyc", "-t1"), ("cpu_epyc", "-t2")], THREADS),
    "| | inference | training step |": (
        [("cpu_xeon_layers", "infer forward"), ("cpu_xeon_layers", "step train")],
        XEON,
    ),
}


def ratio_of(record: str, part: str, case: tuple[str, str], peer: str) -> str:
    """The one ratio of a record that a cell of a table is about. part: of the scene, of the number
    of threads, or the kinds of work."""
    values = []
    for one in load_run(RESULTS / f"{record}.json").comparisons():
        base = one.base
        subject = f"{case[0]}{part}" if part.startswith("-") else case[0]
        works = (case[1] or part).split()
        scene = part if case[1] and not part.startswith("-") else ""
        if base.subject == subject and base.work in works and base.scene.startswith(scene):
            values += [one.ratio(other) for other in one.others if other.peer == peer]
    (value,) = values
    return f"{value.median:.2f}"


@pytest.mark.parametrize("head", TABLES)
def test_tables_of_ratios_are_those_of_records(head: str) -> None:
    columns, rows = TABLES[head]
    expected = [
        [words, *(ratio_of(record, part, case, peer) for record, part in columns)] for words, case, peer in rows
    ]
    assert table(ROOT / "docs" / "speed.md", head) == expected


def targets() -> list[dict[str, str]]:
    """The rows of docs/targets.md."""
    head = next(one for one in read("docs/targets.md").splitlines() if one.startswith("| target |"))
    names = [name.strip() for name in head.strip("|").split("|")]
    return [dict(zip(names, row, strict=True)) for row in table(ROOT / "docs" / "targets.md", head)]


def test_compilations_are_counted_in_one_place() -> None:
    (total,) = re.findall(r"(\d+) compilations", read("docs/targets.md"))
    assert sum(int(row["variants"]) for row in targets()) == int(total)
    others = [page for page in PAGES if page.name != "targets.md"]
    for page in others:
        counts = re.findall(r"\b\d+,?\d{3} (?:compilations|variants|forms)", prose(page))
        assert not counts, f"{name_of(page)} repeats {counts}"


def test_the_page_of_targets_names_what_its_run_lacks() -> None:
    pytest.importorskip("triton")
    from sparse_bridge.tools.offline_compile.catalogue import spaces

    page, _, since = read("docs/targets.md").partition("## Since that run")
    ran = set(re.findall(r"^\| (\w+) \| \d+ \| \d+ \(", page, flags=re.M))
    later, _, gone = since.partition("which came later")
    kernels = set().union(*[spaces(described(arch)) for arch in ("gfx942", "sm_90")])
    targets_run = {row["target"] for row in targets()}
    assert set(re.findall(r"`(\w+)`", later)) == kernels - ran
    assert set(re.findall(r"`(sm_\w+|gfx\w+)`", since)) == set(compiled()) - targets_run
    assert set(re.findall(r"`(\w+)`(?=[^.]* went)", gone.rpartition(";")[2])) == ran - kernels


def test_the_hardware_page_claims_what_was_done() -> None:
    """ "compiled" where targets.md has it, "emulated" where the lanes run the emulator."""
    evidence = {}
    for _, names, what in table(ROOT / "docs" / "hardware.md", "| device | architecture | evidence |"):
        evidence |= dict.fromkeys(re.findall(r"\b(?:sm_|gfx)\w+", names), what)
    compiled = {name for name, what in evidence.items() if "compiled" in what}
    assert compiled == {row["target"] for row in targets()}
    lanes = re.search(r"^ARCHS = (\(.*\))$", read("tests/lanes/test_lanes.py"), flags=re.M)
    assert lanes
    emulated = {name for name, what in evidence.items() if "emulated" in what}
    assert emulated == set(re.findall(r"gfx\w+", lanes[1]))


def test_versions_agree() -> None:
    """Of pyproject.toml, noxfile.py and the pages: the oldest and the newest releases."""
    project = read("pyproject.toml")
    oldest = {
        "Python": re.search(r'requires-python = ">=([\d.]+)"', project),
        "torch": re.search(r'"torch>=([\d.]+)"', project),
    }
    rows = {
        name: (first, newest)
        for name, first, newest, _ in table(ROOT / "docs" / "hardware.md", "| | oldest | newest tried | how |")
    }
    for name, match in oldest.items():
        assert match and match[1] == rows[name][0]
        for page in ("README.md", "docs/questions.md"):
            said = set(re.findall(rf"{name} (\d\.\d+) and later", read(page)))
            assert said == {match[1]}, f"{page}: {name} {said}"
    classifiers = re.findall(r"Python :: 3\.(\d+)", project)
    assert f"3.{max(map(int, classifiers))}" == rows["Python"][1]
    pairs = re.findall(r'^    "(2\.\d+)": \("(3\.\d+)', read("noxfile.py"), flags=re.M)
    assert (pairs[0][0], pairs[-1][0]) == rows["torch"]
    assert (pairs[0][1], pairs[-1][1]) == rows["Triton"]


def test_the_table_of_memory_limits_is_the_record() -> None:
    rows = json.loads((RESULTS / "memory_excess_h200.json").read_text())["rows"]
    shown = limits_table(rows)
    assert len(shown.splitlines()) == 2 + len({(one["level"], one["api"], one["mlp"]) for one in rows})
    assert shown in read("docs/memory.md")
