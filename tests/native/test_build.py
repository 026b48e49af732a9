"""The helper is compiled once, and nothing that goes wrong with that reaches a program."""

from __future__ import annotations

import io
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import time
import types
import zipfile

import filelock
import pytest
import rich.console

from sparse_bridge import native, settings
from sparse_bridge.native import build
from sparse_bridge.refusals import Refusal, Why
from sparse_bridge.tools import doctor
from tests.native.recording import in_threads
from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A cache folder with the helper in it."""
    folder = tmp_path_factory.mktemp("made")
    with settings.override(cache_dir=str(folder)):
        if (problem := build.problem()) is not None:
            pytest.skip(problem)
        build.load()
    return folder


@pytest.fixture
def folder(tmp_path):
    """An empty cache folder."""
    with settings.override(cache_dir=str(tmp_path)):
        yield tmp_path


@pytest.fixture
def anew(monkeypatch, folder):
    """A process that has not asked for the helper."""
    monkeypatch.setattr(native, "_thread", None)
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_reason", Why.HELPER_NOT_BUILT.says())
    monkeypatch.setattr(native, "_listeners", [])
    monkeypatch.setattr(native.atexit, "register", lambda *args: None)
    monkeypatch.setattr(native.os, "register_at_fork", lambda **hooks: None)
    yield folder
    if native._thread is not None:
        native._thread.join()


def script(folder, text):
    """A compiler that is a shell script."""
    made = folder / "compiler"
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return str(made)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix == ".so")


def refused(match):
    """Neither a helper nor an exception, and why."""
    with pytest.raises(Refusal, match=match):
        build.load()
    assert native.module() is None
    reason = native.reason()
    assert re.search(match, reason)
    return reason


def test_it_compiles_without_a_warning(tmp_path):
    if (command := build.compiler()) is None:
        pytest.skip("no compiler")
    command = [*command, *build.FLAGS, f"-I{sysconfig.get_path('include')}", "-Wall", "-Wextra"]
    command += ["-Werror", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    build.write_header(tmp_path)
    subprocess.run([*command, f"-I{tmp_path}", "-fsyntax-only", str(build.SOURCE)], check=True)


def test_the_source_stays_small():
    calls, *parts = (len(part.read_text().splitlines()) for part in build.PARTS)
    assert calls < 1500 and max(parts) < 450


def test_it_is_found_the_second_time(library, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    with settings.override(cache_dir=str(library)):
        assert build.load().Launcher


def test_without_a_compiler(anew, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "HELPER_NO_COMPILER" in refused("no C compiler")
    assert native.described().startswith("not used: no C compiler is installed")


@pytest.mark.parametrize(
    "command, match",
    [
        ("/bin/false", "/bin/false failed with code 1: it said nothing"),
        ("/bin/true", "FileNotFoundError"),  # it made nothing
        ("/no/such/compiler", "FileNotFoundError: .*/no/such/compiler"),
        ("gcc 'unfinished", "gcc 'unfinished"),
        ("/bin/sh -c", "failed with code"),
        ("/bin", "PermissionError"),
        ("script: echo much >&2; echo 'no such flag' >&2; exit 3", "failed with code 3: no such flag"),
        ('script: for it; do last="$it"; done; echo nothing > "$last"', "ImportError"),  # whole, and no module
        ("script: exec sleep 30", "compiler took longer than 0.3 seconds"),
    ],
)
def test_a_compiler_that_is_none(anew, monkeypatch, command, match):
    kind, _, text = command.partition("script: ")
    monkeypatch.setenv("CC", command if kind else script(anew, text))
    if "sleep" in text:
        monkeypatch.setattr(build, "_LONGEST", 0.3)
    refused(match)
    assert (match == "ImportError" or not files(anew)) and native.described()


def test_without_pythons_headers(anew, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(anew))
    assert "python3-dev" in refused("headers of Python are not in")
    assert "python3-dev" in native.described()


def test_a_folder_that_cannot_be_written(anew, tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=str(tmp_path / "file")):
        refused("NotADirectoryError|FileExistsError")


def test_a_read_only_folder(library, tmp_path, monkeypatch):
    """What is there is used, whatever else cannot be done."""

    def refuse(*args, **named):
        raise PermissionError("read-only")

    for name in ("mkdir", "write_bytes"):
        monkeypatch.setattr(pathlib.Path, name, refuse)
    with settings.override(cache_dir=str(library)):
        assert build.load()
    with settings.override(cache_dir=str(tmp_path)), pytest.raises(Refusal, match="read"):
        build.load()


def cut(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize("change", [cut, lambda data: b"", lambda data: bytes(len(data)), lambda data: b"x" + data[1:]])
def test_a_library_that_was_changed_is_not_loaded(library, folder, monkeypatch, change):
    shutil.copytree(library, folder, dirs_exist_ok=True)
    there = files(folder)[0]
    there.write_bytes(change(there.read_bytes()))
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(Refusal, match="/bin/false failed"):
        build.load()


def copying(library, folder, before=""):
    """A compiler that is quick: it has done it before."""
    made = f'for it; do last="$it"; done; exec cp {files(library)[0]} "$last"'
    return script(folder, f"{before}\n{made}")


def test_it_is_compiled_again(library, folder, monkeypatch):
    monkeypatch.setenv("CC", copying(library, folder))
    shutil.copytree(library, folder, dirs_exist_ok=True)
    there = files(folder)[0]
    there.write_bytes(cut(there.read_bytes()))
    assert build.load().Launcher
    assert len(files(folder)) >= 1 and not list(folder.rglob("tmp*"))


def environment_of(folder):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"SPARSE_BRIDGE_CACHE_DIR": str(folder), "PYTHONPATH": path}


def test_processes_compile_it_once(library, tmp_path):
    calls = tmp_path / "calls"
    compiler = copying(library, tmp_path, f"echo call >> {calls}; sleep 0.3")
    code = "from sparse_bridge.native import build; print(build.load().Launcher)"
    environment = environment_of(tmp_path) | {"CC": compiler}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert all(b"Launcher" in one.communicate(timeout=PATIENCE)[0] for one in running)
    assert calls.read_text().split() == ["call"] and len(files(tmp_path)) == 1


def test_another_process_that_compiles_for_ever(anew, monkeypatch):
    monkeypatch.setattr(build, "_LONGEST", 0.2)
    own = filelock.FileLock

    def held(path, timeout):
        lock = own(path, timeout=timeout)
        other = own(path, thread_local=False)
        other.acquire()
        held.others.append(other)
        return lock

    held.others = []
    monkeypatch.setattr(build.filelock, "FileLock", held)
    with pytest.raises(Refusal, match="Timeout"):
        build.load()
    for other in held.others:
        other.release()


def test_launches_wait_for_it_once(anew, monkeypatch):
    monkeypatch.setenv("CC", script(anew, "sleep 1.5; exit 1"))
    monkeypatch.setattr(native, "_WAIT", 0.4)
    start = time.monotonic()
    for _ in range(5):
        assert native.module() is None
    assert time.monotonic() - start < 1.2
    assert native.reason() == Why.HELPER_NOT_BUILT.says()


@pytest.mark.parametrize(
    "changed, match",
    [
        ({"GIL": 1}, "without a global lock"),
        ({"byteorder": "big"}, "little-endian"),
        ({"implementation": types.SimpleNamespace(name="pypy")}, "CPython on Linux"),
        ({"version_info": (3, 9, 18)}, "it is for Python 3.10 to 3.14"),
        ({"version_info": (3, 15, 0)}, "it is for Python 3.10 to 3.14"),
    ],
    ids=str,
)
def test_another_python(anew, monkeypatch, changed, match):
    own = {name: getattr(sys, name) for name in ("byteorder", "implementation", "version_info")}
    monkeypatch.setattr(build, "sys", types.SimpleNamespace(**own | changed))
    if "GIL" in changed:
        monkeypatch.setattr(build.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    refused(match)
    assert match in native.described()


def test_it_can_be_turned_off(anew):
    with settings.override(native=False):
        assert native.module() is None and native._thread is None
        assert native.reason() == native.described() == Why.HELPER_OFF.says()


def test_what_doctor_says(anew):
    facts = doctor.collect()
    assert facts["native"] == native.described()
    lines = io.StringIO()
    doctor.show(facts, rich.console.Console(file=lines, width=200))
    assert re.search(rf"helper in C\W+{re.escape(native.described())}", lines.getvalue())


def test_a_listener_that_fails(anew, library, caplog):
    heard = []

    def fails(module):
        raise TypeError("no slot of that name")

    with settings.override(cache_dir=str(library)):
        native.when_ready(fails)
        native.when_ready(heard.append)
        assert native.module() is None
    assert native.reason() == Why.HELPER_ERROR.says("TypeError", "no slot of that name") and not heard
    assert "no slot of that name" in caplog.text


def test_listeners_hear_of_it_now_or_later(anew, library):
    heard = []
    with settings.override(cache_dir=str(library)):
        native.when_ready(heard.append)
        made = native.module()
        native.when_ready(heard.append)
    assert heard == [made, made] and native.reason() is None


def test_many_threads_ask_at_once(anew, library):
    with settings.override(cache_dir=str(library)):
        found = in_threads(8, lambda _: native.module())
    assert found[0] is not None and len(set(map(id, found))) == 1


MODULES = ["fused_plan", "layers", "deferred", "deferred.conv", "kernel_products"]


@pytest.mark.slow
@pytest.mark.parametrize("first", MODULES)
def test_it_may_be_there_before_the_modules_that_use_it(first, library):
    code = f"""
from sparse_bridge import native
assert native.module() is not None
import sparse_bridge.core.conv.{first}
from sparse_bridge.core.conv import layers
from sparse_bridge.native import calls as native_calls
assert native_calls.helper is native.module() and native_calls.known_call
"""
    subprocess.run([sys.executable, "-c", code], env=environment_of(library), check=True)


@pytest.mark.slow
def test_what_is_shipped(tmp_path):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    away = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "sparse_bridge", tmp_path / "sparse_bridge", ignore=away)
    code = "import setuptools.build_meta as m; m.build_sdist('made'); m.build_wheel('made')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    wheel, sdist = next(tmp_path.glob("made/*.whl")), next(tmp_path.glob("made/*.tar.gz"))
    with zipfile.ZipFile(wheel) as held:
        names = {f"sparse_bridge/native/{part.name}" for part in build.PARTS}
        assert names <= set(held.namelist())
    with tarfile.open(sdist) as held:
        assert any(name.endswith("/sparse_bridge/native/native.c") for name in held.getnames())
