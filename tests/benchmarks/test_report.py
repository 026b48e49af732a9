"""Reports and pictures of records."""

import sys

import pytest

from benchmarks import plots
from benchmarks.report import markdown, show, suite_table
from benchmarks.results import Run
from sparse_bridge.__main__ import main

from .test_results import RECORDS, figure

CASES = [f"layers/s/c{c}/fp16/forward" for c in (16, 32, 64, 128)]


@pytest.fixture
def run():
    """A win, a loss, a draw and a failure."""
    made = Run(["spconv", "bridge"], machine={"gpu": "none"}, command="bench", started="today")
    for index, rounds in enumerate(([0.5] * 3, [2.0] * 3, [0.9, 1, 1.1])):
        case = CASES[index]
        more = {"rows": 100, "channels": 16 << index, "floor_ms": 0.25}
        made.figures.append(figure("spconv", [1, 1, 1], case, peak_mb=10.0, **more))
        made.figures.append(figure("bridge", rounds, case, peak_mb=10.0 + 5 * index, **more))
    made.figures.append(figure("spconv", case=CASES[3], error="bad | pipe"))
    made.figures.append(figure("bridge", [1, 1, 1], CASES[3]))
    return made


def test_losses_are_in_the_table_and_marked(run):
    header, rows = suite_table(run, "layers")
    ratio, remarks = header.index("bridge / spconv"), -1
    assert [row[ratio] for row in rows] == ["0.50", "2.00", "1.00", "-"]
    assert rows[0][remarks] == ""
    assert rows[1][remarks] == "slower; more memory"
    assert rows[2][remarks] == "even; more memory"
    assert "bad \\| pipe" in rows[3][remarks]
    assert rows[0][header.index("floor")] == "25% / 50%"
    assert all(len(row) == len(header) for row in rows)


def test_a_peer_alone_shows_its_spread(run):
    alone = Run(["bridge"], [one for one in run.figures if one.peer == "bridge"])
    header, rows = suite_table(alone, "layers")
    assert header[-3:] == ["bridge, ms", "quartiles", ""]
    assert [row[-2] for row in rows[1:3]] == ["2.00 .. 2.00", "0.950 .. 1.05"]
    assert all(len(row) == len(header) for row in rows)
    assert "quartiles" not in header[:-2]


def test_markdown_says_what_where_and_how(run):
    text = markdown([run])
    assert "**2.00**" in text and "**slower**" in text and "*even*" in text
    assert "1 cases faster, 1 even, **1 slower**; geometric mean of the ratios 1.00" in text
    assert "gpu none" in text and "`bench`, today" in text


def test_without_rich_the_report_is_plain(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(run)
    assert capsys.readouterr().out.strip() == markdown([run]).strip()


def test_bars_and_curves_are_drawn_for_what_there_is(run, tmp_path):
    names = {path.name for path in plots.draw([run], tmp_path)}
    assert names == {"layers-ratios.png", "layers-floor.png", "layers-channels-fp16.png"}
    alone = Run(["bridge"], [one for one in run.figures if one.peer == "bridge"])
    assert not any("ratios" in path.name for path in plots.draw([alone], tmp_path / "alone"))


def test_scale_curves_are_drawn(tmp_path):
    made = Run(["spconv", "bridge"])
    for rows in (1000, 4000, 16000):
        case = f"scale/sheet_{rows}/c64/fp16/forward"
        more = {"rows": rows, "channels": 64, "peak_mb": rows / 10, "floor_ms": rows / 1e6}
        made.figures.append(figure("spconv", [rows / 1e4], case, **more))
        made.figures.append(figure("bridge", case=case, rows=rows, channels=64, error="stopped"))
    assert [path.name for path in plots.draw([made], tmp_path)] == ["scale-voxels-fp16.png"]


def test_the_command_renders_records_old_and_new(run, tmp_path):
    run.save(tmp_path / "new.json")
    files = [str(RECORDS / "h200_fp32.json"), str(tmp_path / "new.json")]
    out, pictures = tmp_path / "out" / "report.md", tmp_path / "pictures"
    command = ["bench", "report", *files, "--markdown", str(out), "--plots", str(pictures)]
    assert main(command) == 0
    text = out.read_text()
    assert "c512, shell128" in text and "**1.75**" in text  # a recorded loss
    found = sorted(path.name for path in pictures.iterdir())
    assert "shells-ratios-1.png" in found and "layers-ratios-2.png" in found
    for name in found:
        assert f"(../pictures/{name})" in text
        assert (pictures / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_need_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = str(RECORDS / "cpu_nuscenes.json")
    assert main(["bench", "report", record, "--plots", str(tmp_path / "p")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_backbones_are_measured_by_the_base_s_second():
    made = Run(["spconv", "bridge_torchsparse"])
    for work, times in (("infer", (4.0, 6.0)), ("stream", (5.0, 10.0))):
        second = work if work == "infer" else "stream-fixed"
        case = f"backbones/s/second/fp16/{second}"
        made.figures.append(figure("spconv", [times[0]] * 3, case))
        made.figures.append(figure("bridge_torchsparse", case=case, error="no second"))
        case = f"backbones/s/unet42/fp16/{work}"
        made.figures.append(figure("spconv", case=case, error="no unet42"))
        made.figures.append(figure("bridge_torchsparse", [times[1]] * 3, case))
    header, rows = suite_table(made, "backbones")
    shares = [row[header.index("of spconv's SECOND")] for row in rows]
    assert shares == ["1.00 / -", "- / 1.50", "1.00 / -", "- / 2.00"]
    assert all(len(row) == len(header) for row in rows)
