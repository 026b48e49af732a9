from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess
import sys

import pytest

from sparse_bridge import __main__ as command_line
from tests.patience import PATIENCE

from .fakes import write, write_real, write_standin

DRIVER = pathlib.Path(__file__).with_name("driver.py")
SHOW = """
    import json, sys
    import invented.engine as engine
    print(json.dumps([sys.argv, __name__, sys.path[0], __file__, engine.Conv.__module__]))
"""


@pytest.fixture
def machine(tmp_path):
    """run(*arguments, cwd=, **environment) -> completed process, where `invented` is absent."""
    write_standin(tmp_path / "standins", "invented")

    def run(*arguments, cwd=tmp_path, **environment):
        return subprocess.run(
            [sys.executable, str(DRIVER), str(tmp_path), "invented", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=PATIENCE,
            env={**os.environ, **environment},
        )

    return run


def test_run_a_script_as_python_would(machine, tmp_path):
    script = write(tmp_path / "project" / "train.py", SHOW)
    done = machine("run", "project/train.py", "--report", "-m", "x", "--", "--help")
    assert done.returncode == 0, done.stderr
    argv, name, first, file, module = json.loads(done.stdout)
    assert argv == ["project/train.py", "--report", "-m", "x", "--", "--help"]
    assert (name, first) == ("__main__", str(script.parent))
    assert (tmp_path / file).samefile(script)
    assert module == "invented.engine.conv"
    assert done.stderr == ""


def test_run_a_module_as_python_would(machine, tmp_path):
    write(tmp_path / "project" / "pack" / "__init__.py")
    script = write(tmp_path / "project" / "pack" / "train.py", SHOW)
    done = machine("run", "-m", "pack.train", "-x", "1", cwd=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    argv, name, first, file, _ = json.loads(done.stdout)
    assert argv == [str(script), "-x", "1"]
    assert (name, first, file) == ("__main__", str(tmp_path / "project"), str(script))


def test_exit_status_and_tracebacks_of_the_script_pass_through(machine, tmp_path):
    write(tmp_path / "leave.py", "raise SystemExit(7)")
    assert machine("run", "leave.py").returncode == 7
    write(tmp_path / "fail.py", "1 / 0")
    failed = machine("run", "fail.py")
    assert failed.returncode == 1 and "ZeroDivisionError" in failed.stderr
    write(tmp_path / "ours.py", "import sparse_bridge\nsparse_bridge.enable('nonesuch')")
    ours = machine("run", "ours.py")
    assert ours.returncode == 1
    assert "ours.py" in ours.stderr and "SettingError" in ours.stderr, "the script's own line shows"


@pytest.mark.slow
def test_options_of_run_and_the_report(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "layers.py", "from invented.engine import Conv; Conv().forward(1); Conv().forward(1, 2)")
    done = machine("run", "--report", "--framework", "invented", "layers.py")
    assert done.returncode == 0 and done.stdout == ""
    assert "invented 9.1.0: patch (invented is installed and imports)" in done.stderr
    assert "scale=2 unsupported (1)" in done.stderr
    file = tmp_path / "report.json"
    assert machine("run", "--report-json", str(file), "layers.py").stderr == ""
    counts = json.loads(file.read_text())["layers"]["invented"]["Conv"]
    assert counts == {"bridged": 1, "original": {"scale=2 unsupported": 1}}
    refused = machine("run", "--report-json", str(tmp_path), "layers.py")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    strict = machine("run", "--strict", "layers.py")
    assert strict.returncode == 1 and "UnsupportedError" in strict.stderr
    shadowed = machine("run", "layers.py", SPARSE_BRIDGE_ENABLE="mode=standin")
    assert "TypeError" in shadowed.stderr, "the stand-in's Conv wants a width"


def test_what_is_done_to_models_is_an_option_of_run(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    shown = "from sparse_bridge import settings; print(settings.get().optimize)"
    write(tmp_path / "shown.py", shown)
    assert machine("run", "shown.py").stdout == "auto\n"
    assert machine("run", "--optimize", "graphs", "shown.py").stdout == "graphs\n"
    assert machine("run", "shown.py", SPARSE_BRIDGE_OPTIMIZE="off").stdout == "off\n"
    assert machine("run", "--optimize", "all", "shown.py").returncode == 2


def test_refusals_are_one_line(machine, tmp_path):
    write(tmp_path / "empty.py")
    for done in (
        machine("run", "--mode", "patch", "empty.py"),
        machine("run", "--framework", "nonesuch", "empty.py"),
        machine("run", "--framework", "nonesuch", "--framework", "invented", "empty.py"),
        machine("run", "empty.py", SPARSE_BRIDGE_ENABLE="mode=fast"),
    ):
        assert done.returncode == 2
        assert done.stderr.startswith("sparse_bridge: ") and done.stderr.count("\n") == 1
    assert machine("run", "missing.py").returncode == 2
    assert machine("nonsense").returncode == 2


def test_spawned_workers_of_a_script_that_enables_at_the_top(tmp_path):
    write_standin(tmp_path / "standins", "invented")
    here = DRIVER.parent
    script = write(
        tmp_path / "spawning.py",
        f"""
        import sys
        sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]
        import multiprocessing, pathlib, sparse_bridge
        from fakes import FakeAdapter
        from sparse_bridge.adapters import base
        standins = pathlib.Path({str(tmp_path)!r}, "standins")
        base.register_for_testing(FakeAdapter("invented", standins))
        sparse_bridge.enable("invented")
        from invented.engine import Conv

        def width(conv):
            return conv.width + isinstance(conv, Conv)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(width, (Conv(41),)))
        """,
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.strip() == "42", done.stderr


def test_doctor(machine):
    done = machine("doctor", "--json", SPARSE_BRIDGE_DATAFLOW="explicit", SPARSE_BRIDGE_DATAFLOWS="x")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    (framework,) = facts["frameworks"]
    assert framework["installed"] is False
    assert (framework["mode"], framework["version"]) == ("standin", "9.0.3")
    assert framework["reason"] == "invented is not installed"
    assert facts["devices"][0]["device"] == "cpu"
    assert facts["settings"]["dataflow"] == "explicit"
    assert facts["environment"]["SPARSE_BRIDGE_DATAFLOW"] == "explicit"
    assert facts["unknown_variables"] == ["SPARSE_BRIDGE_DATAFLOWS"]


def test_doctor_as_tables(world, capsys):
    name = world.framework("working").name
    assert command_line.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert name in shown and "patch" in shown and "SPARSE_BRIDGE_ENABLE" in shown
    world.framework("broken")
    assert command_line.main(["doctor"]) == 0
    assert "libfake" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(arguments)
    assert left.value.code == 0
    assert "usage: python -m sparse_bridge" in capsys.readouterr().out


def test_without_torch_every_command_says_what_to_install(tmp_path):
    """A process that finds no torch: one line, not a traceback."""
    write(tmp_path / "sitecustomize.py", "import sys; sys.modules['torch'] = None")
    root = str(DRIVER.parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    for words in (["doctor"], ["demo"], ["cache", "show"], ["warm"], ["surface", "spconv"]):
        done = subprocess.run(
            [sys.executable, "-m", "sparse_bridge", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=PATIENCE,
            env=environment,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and "finds no torch" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_what_the_machine_refuses_is_one_line(number, monkeypatch, capsys):
    def fail(args):
        raise OSError(number, os.strerror(number), "somewhere/out.json")

    monkeypatch.setattr(command_line, "run_doctor", fail)
    assert command_line.main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sparse_bridge: somewhere/out.json: {os.strerror(number)}; ")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    """`doctor | head`: the pipe is closed while the command still writes."""
    command = [sys.executable, "-m", "sparse_bridge", "doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in said and "BrokenPipe" not in said, said


@pytest.mark.parametrize("name", ["doctor", *command_line._LAZY])
def test_every_command_answers_a_program(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    if name == "cache":  # has commands of its own
        with pytest.raises(SystemExit):
            command_line.main([name, "clear", "--help"])
        shown = capsys.readouterr().out
    assert "--report-json" in shown if name == "run" else "--json" in shown
