"""Child processes of a program under `run`, and of one that calls `enable()` itself."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from sparse_bridge.adapters.enabling import inherited
from tests.patience import PATIENCE

from .fakes import write, write_real, write_standin

HERE = pathlib.Path(__file__).parent
DRIVER = HERE / "driver.py"
WAYS = [way for way in ("fork", "spawn", "forkserver") if os.name == "posix" or way == "spawn"]
# What a child tells of its bridge.
TELL = """
    import sys

    def tell(scale=1):
        from invented.engine import Conv
        from sparse_bridge import enable, settings
        from sparse_bridge.adapters import call_stats
        made = Conv(3) if "standin" in Conv.forward.__code__.co_consts else Conv()
        made.forward(1, *([scale] if scale != 1 else []))
        mode = repr(enable("invented")).strip(">").split()[-1]
        return [made.forward(1)[0], mode, call_stats.is_strict("invented"), settings.get().optimize]
"""


@pytest.fixture
def machine(tmp_path):
    """run(options of run, script) -> completed process, with the framework `invented`."""
    write_standin(tmp_path / "standins", "invented")
    # The program's own; children learn of the invented framework there.
    write(
        tmp_path / "own" / "sitecustomize.py",
        f"""
        import pathlib, sys
        folder = {str(tmp_path)!r}
        sys.path[:0] = [folder, folder + "/site", {str(HERE)!r}]
        sys.own_sitecustomize = True
        def register():
            from fakes import FakeAdapter
            from sparse_bridge.adapters import base
            base.ADAPTERS.clear()
            standins = pathlib.Path(folder, "standins")
            base.register_for_testing(FakeAdapter("invented", standins))
        if any(type(one).__name__ == "Joining" for one in sys.meta_path):
            register()
        """,
    )
    write(tmp_path / "telling.py", TELL)

    def run(*arguments, options=(), python=(), **environment):
        path = os.pathsep.join([str(tmp_path / "own"), str(HERE.parents[1])])
        return subprocess.run(
            [sys.executable, *python, str(DRIVER), str(tmp_path), "invented", "run", *options]
            + [str(one) for one in arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    return run


def program(tmp_path, text):
    return write(tmp_path / "program.py", text)


def answers(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


IN_CHILDREN = """
    import concurrent.futures, json, multiprocessing, sys
    from telling import tell

    def talk(queue):
        queue.put(tell())

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(1) as pool:
            print(json.dumps(pool.apply(tell)))
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            print(json.dumps(executor.submit(tell).result()))
        queue = context.SimpleQueue()
        child = context.Process(target=talk, args=(queue,))
        child.start()
        print(json.dumps(queue.get()))
        child.join()
        assert child.exitcode == 0
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_children_are_bridged_as_the_program(machine, tmp_path, way):
    script = program(tmp_path, IN_CHILDREN)
    options = ("--strict", "--optimize", "off")
    wanted = ["standin", "standin", True, "off"]
    assert answers(machine(script, way, options=options)) == [wanted] * 3
    write_real(tmp_path / "site", "invented")
    wanted = ["bridged", "patch", False, "auto"]
    assert answers(machine(script, way)) == [wanted] * 3
    forced = machine(script, way, options=("--mode", "standin"))
    assert answers(forced) == [["standin", "standin", False, "auto"]] * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_children_have_the_limit_of_the_program(machine, tmp_path, way):
    write_real(tmp_path / "site", "invented")
    write(
        tmp_path / "limits.py",
        """
        def limit():
            import invented.engine
            from sparse_bridge import memory
            return memory.limit
        """,
    )
    script = program(
        tmp_path,
        """
        import json, multiprocessing, sys
        from limits import limit

        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print(json.dumps([limit(), pool.apply(limit)]))
        """,
    )
    assert answers(machine(script, way)) == [[None, None]]
    assert answers(machine(script, way, options=("--memory-limit", "8GiB"))) == [[8 << 30] * 2]
    done = machine(script, way, options=("--memory-limit", "lots"))
    assert done.returncode == 2 and "a memory limit is 'lots'" in done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_main_module_that_imports_the_framework_first(machine, tmp_path, way):
    write_real(tmp_path / "site", "invented")
    script = program(tmp_path, "from invented.engine import Conv" + IN_CHILDREN.replace("\n    ", "\n"))
    assert answers(machine(script, way)) == [["bridged", "patch", False, "auto"]] * 3


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="there is no forkserver")
def test_a_fork_server_that_preloads_the_framework(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "loaded.py", "import invented.engine")
    script = program(
        tmp_path,
        """
        import json, multiprocessing
        from telling import tell
        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver")
            multiprocessing.set_forkserver_preload(["loaded"])
            with multiprocessing.Pool(1) as pool:
                print(json.dumps(pool.apply(tell)))
        """,
    )
    done = machine(script, options=("--report", "--strict"))
    assert answers(done) == [["bridged", "patch", True, "auto"]]
    assert "layers of 1 child process" in done.stderr


@pytest.mark.slow
def test_programs_that_are_started_as_programs(machine, tmp_path):
    write(tmp_path / "sub.py", "import json, telling; print(json.dumps(telling.tell()))")
    script = program(
        tmp_path,
        """
        import subprocess, sys
        subprocess.run([sys.executable, "sub.py"], check=True)
        subprocess.run([sys.executable, "-m", "sub"], check=True)
        """,
    )
    wanted = ["standin", "standin", True, "auto"]
    assert answers(machine(script, options=("--strict",))) == [wanted] * 2
    write_real(tmp_path / "site", "invented")
    done = machine(script, options=("--report",))
    assert answers(done) == [["bridged", "patch", False, "auto"]] * 2
    assert "layers of 2 child processes" in done.stderr


def test_what_strict_mode_refuses_is_refused_in_children(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    script = program(
        tmp_path,
        """
        import multiprocessing
        from telling import tell
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.apply(tell, (2,))
        """,
    )
    assert machine(script).returncode == 0
    strict = machine(script, options=("--strict",))
    assert strict.returncode == 1 and "Strict mode does not run the original" in strict.stderr


def test_a_child_that_cannot_be_bridged_says_so(machine, tmp_path):
    """It must not compute in the original without a word."""
    write_real(tmp_path / "site", "invented")
    script = program(
        tmp_path,
        """
        import subprocess, sys
        code = '''
        import sys, sparse_bridge.adapters.base as base
        def refuse(mode, profile):
            raise base.UnsupportedError("not here")
        base.load("invented").begin = refuse
        for attempt in range(2):
            try:
                import invented
            except base.UnsupportedError as error:
                print(error)
        '''
        import textwrap
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
        """,
    )
    done = machine(script)
    assert done.stdout == "not here\n" * 2, done.stderr


def test_a_child_imports_a_framework_as_it_would_without_us(machine, tmp_path):
    """Looking for it imports nothing, its modules are run once and keep their spec."""
    write_real(tmp_path / "site", "invented")
    code = """
        import importlib.util, json, sys
        found = importlib.util.find_spec("invented") is not None
        early = sorted({"invented", "sparse_bridge.adapters.lifecycle"} & sys.modules.keys())
        import invented, invented.engine.conv
        spec = invented.__spec__
        print(json.dumps([found, early, spec.origin == invented.__file__, invented.engine.Conv is
            invented.engine.conv.Conv, sys.modules["invented"] is invented, sys.own_sitecustomize]))
        try:
            import invented_tv.nonesuch
        except ModuleNotFoundError as error:
            print(json.dumps(str(error)))
    """
    write(tmp_path / "sub.py", code)
    script = program(tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'sub.py'])")
    first, second = answers(machine(script))
    assert first == [True, [], True, True, True, True]
    assert second == "No module named 'invented_tv'"


def test_metadata_of_a_stand_in_that_nobody_has_imported_yet(machine, tmp_path):
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.version('invented')))"
    write(tmp_path / "sub.py", code)
    script = program(tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'sub.py'])")
    assert answers(machine(script)) == ["9.0.3"]


@pytest.mark.slow
def test_children_follow_what_the_program_changes(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    script = program(
        tmp_path,
        """
        import subprocess, sys, sparse_bridge
        code = "import invented.engine as e, sparse_bridge as s; "
        code += "print(e.Conv().forward(1)[0], s.status()['invented'].enabled)"
        def child():
            subprocess.run([sys.executable, "-c", code], check=True)
        child()
        sparse_bridge.disable()
        child()
        sparse_bridge.enable("invented")
        child()
        """,
    )
    done = machine(script)
    assert done.stdout.split() == ["bridged", "True", "original", "False", "bridged", "True"]


@pytest.mark.slow
def test_a_child_that_enables_or_disables_by_itself(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    code = """
        import sys, sparse_bridge
        handle = sparse_bridge.enable("invented")
        print(handle.status()["invented"].mode, "invented" in sys.modules)
        try:
            sparse_bridge.enable("invented", mode="standin")
        except sparse_bridge.errors.LifecycleError as error:
            print("refused")
        handle.disable()
        import invented.engine
        print(invented.engine.Conv().forward(1)[0])
        sparse_bridge.disable("invented")
        print(invented.engine.Conv().forward(1)[0])
    """
    write(tmp_path / "sub.py", code)
    script = program(tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'sub.py'])")
    done = machine(script)
    assert done.stdout.split() == ["patch", "True", "refused", "bridged", "original"], done.stderr
    write(
        tmp_path / "sub.py",
        "import sparse_bridge; sparse_bridge.disable()\nimport invented.engine\n"
        "print(invented.engine.Conv().forward(1)[0])",
    )
    assert machine(script).stdout.split() == ["original"]


@pytest.mark.slow
def test_a_run_inside_of_a_run_has_its_own_options(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    write(tmp_path / "sub.py", "import json, telling; print(json.dumps(telling.tell()))")
    inner = [str(DRIVER), str(tmp_path), "invented", "run", "--mode", "standin", "sub.py"]
    script = program(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, *{inner}], check=True)")
    done = machine(script, options=("--strict", "--report"))
    assert answers(done) == [["standin", "standin", False, "auto"]]
    assert "no layer has run" in done.stderr


REPORTED = """
    import multiprocessing, sys, time
    from telling import tell

    def work(killed, told):
        tell()
        told.set()
        if killed:
            time.sleep(600)

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(1) as pool:  # its worker is terminated
            pool.apply(tell)
        told, unread = context.Event(), context.Event()
        killed = context.Process(target=work, args=(True, told), daemon=True)
        killed.start()
        tell()
        late = context.Process(target=work, args=(False, unread))
        late.start()  # Python waits for it after the program's last line
        told.wait()
        sys.exit(7)
"""


@pytest.mark.sample(1)
@pytest.mark.timed
@pytest.mark.parametrize("way", WAYS)
def test_the_report_counts_layers_of_children(machine, tmp_path, way):
    write_real(tmp_path / "site", "invented")
    script = program(tmp_path, REPORTED)
    file = tmp_path / "report.json"
    done = machine(script, way, options=("--report", "--report-json", file), TMPDIR=str(tmp_path))
    assert done.returncode == 7
    assert "layers of 3 child processes are counted" in done.stderr
    values = json.loads(file.read_text())
    assert values["children"] == 3
    assert values["layers"]["invented"]["Conv"] == {"bridged": 8, "original": {}}
    assert [one["imported"] for one in values["frameworks"] if one["framework"] == "invented"] == [True]
    assert not list(tmp_path.glob("sparse_bridge-*")), "nothing is left behind"


@pytest.mark.slow
@pytest.mark.timed
def test_a_report_of_a_program_that_fails_while_children_work(machine, tmp_path):
    write_real(tmp_path / "site", "invented")
    script = program(tmp_path, REPORTED.replace("sys.exit(7)", "raise ValueError('stop')"))
    done = machine(script, WAYS[0], options=("--report",))
    assert done.returncode == 1 and "ValueError: stop" in done.stderr
    assert "layers of 3 child processes are counted" in done.stderr


@pytest.mark.slow
def test_counting_goes_on_where_it_cannot_be_written(machine, tmp_path):
    code = """
        import json, os, shutil, sys
        counts = json.loads(os.environ["SPARSE_BRIDGE_INHERITED"])["counts"]
        shutil.rmtree(counts)
        import telling
        print(telling.tell()[0])
        os.mkdir(counts)
    """
    write(tmp_path / "sub.py", code)
    write_real(tmp_path / "site", "invented")
    script = program(tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'sub.py'])")
    done = machine(script, options=("--report",))
    assert done.stdout == "bridged\n", done.stderr


def test_other_pythons_are_left_alone(machine, tmp_path):
    """A Python of another installation that the program starts, here by what it says of itself."""
    code = "import sys; print([type(one).__name__ for one in sys.meta_path], sys.own_sitecustomize)"
    write(tmp_path / "sub.py", code)
    script = program(
        tmp_path,
        """
        import json, os, subprocess, sys
        state = json.loads(os.environ["SPARSE_BRIDGE_INHERITED"])
        state["python"][0] += "-other"
        os.environ["SPARSE_BRIDGE_INHERITED"] = json.dumps(state)
        subprocess.run([sys.executable, "sub.py"], check=True)
        del os.environ["SPARSE_BRIDGE_INHERITED"]
        subprocess.run([sys.executable, "sub.py"], check=True)
        """,
    )
    done = machine(script)
    assert done.stdout.count("True") == 2 and "Joining" not in done.stdout, done.stderr


def test_options_of_python_that_keep_children_from_inheriting(machine, tmp_path):
    script = program(tmp_path, "print('ran')")
    done = machine(script, python=("-I",))
    assert done.stdout == "ran\n" and "python -I keeps" in done.stderr
    refused = machine(script, python=("-E",), options=("--strict",))
    assert refused.returncode == 2 and refused.stdout == ""
    assert "python -E keeps" in refused.stderr and refused.stderr.count("\n") == 1
    assert machine(script).stderr == ""


def test_pythonpath_is_the_programs_own_again(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", "b"]))
    inherited.hand_on(dict)
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    assert paths[1:] == ["a", "b"] and os.path.isfile(os.path.join(paths[0], "sitecustomize.py"))
    assert os.listdir(paths[0]).count("sitecustomize.py") == 1
    inherited.hand_on(dict)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == paths
    inherited.forget()
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["a", "b"])
    assert inherited.VARIABLE not in os.environ
    monkeypatch.delenv("PYTHONPATH")
    inherited.hand_on(dict)
    inherited.forget()
    assert "PYTHONPATH" not in os.environ
