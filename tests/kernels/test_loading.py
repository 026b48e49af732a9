"""Launchers that several threads load at once stay apart."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
import threading
import time
import types

import pytest

pytest.importorskip("triton")
from sparse_bridge.kernels.runtime import triton_compat

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "one_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_one_name(void) { return PyModule_Create(&module); }
"""


def loader():
    """What Triton does, slowly: modules of one name, whatever their file."""

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        time.sleep(0.002)
        return module

    return types.SimpleNamespace(_load_module_from_path=load)


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Four C modules of one name, whose functions tell their number."""
    compiler = sysconfig.get_config_var("CC")
    include = sysconfig.get_paths()["include"]
    paths = []
    for number in range(4):
        folder = tmp_path_factory.mktemp(f"module{number}")
        (folder / "one_name.c").write_text(SOURCE % number)
        made = folder / ("one_name" + sysconfig.get_config_var("EXT_SUFFIX"))
        command = [*compiler.split(), "-shared", "-fPIC", f"-I{include}", "one_name.c", "-o", made]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no C compiler for Python modules here: {error}")
        paths.append(str(made))
    return paths


def wrong(build, modules):
    """How many loads of several threads gave another module's function."""
    found = []

    def work(first):
        for turn in range(12):
            number = (first + turn) % len(modules)
            module = build._load_module_from_path("one_name", modules[number])
            found.append(module.launch() != number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 48
    return sum(found)


def test_modules_of_one_name(modules):
    build = loader()
    assert triton_compat.load_separately(build)
    assert wrong(build, modules) == 0
    load = build._load_module_from_path
    assert triton_compat.load_separately(build) and build._load_module_from_path is load  # once


def test_older_releases_load_one_at_a_time():
    assert not triton_compat.load_separately(types.SimpleNamespace())
    assert triton_compat.loading() is not None
