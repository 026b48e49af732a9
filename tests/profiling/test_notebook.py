"""The magics, in IPython where it is installed and in a shell that plays one."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters.call_stats import Report, Statuses
from sparse_bridge.tools.profiling.recorder import ModelProfile


class Shell:
    """What the extension asks of an IPython shell."""

    def __init__(self):
        self.user_ns = {"torch": torch, "model": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}
        self.magics_manager = types.SimpleNamespace(magics={"line": {}, "cell": {}})

    def register_magic_function(self, function, magic_kind, magic_name):
        for kind in magic_kind.split("_"):
            self.magics_manager.magics[kind][magic_name] = function

    def ev(self, text):
        return eval(text, self.user_ns)

    def run_cell(self, text):
        try:
            exec(text, self.user_ns)
        except Exception:
            return types.SimpleNamespace(success=False)
        return types.SimpleNamespace(success=True)

    def run_line_magic(self, name, line):
        return self.magics_manager.magics["line"][name](line)

    def run_cell_magic(self, name, line, cell):
        return self.magics_manager.magics["cell"][name](line, cell)


def ipython():
    shell_class = pytest.importorskip("IPython").InteractiveShell
    shell = shell_class()
    shell.user_ns |= Shell().user_ns
    return shell


@pytest.fixture(params=["played", "ipython"])
def shell(request):
    made = Shell() if request.param == "played" else ipython()
    sparse_bridge.load_ipython_extension(made)
    yield made
    sparse_bridge.unload_ipython_extension(made)
    assert not any("sparse_profile" in magics for magics in made.magics_manager.magics.values())


def test_a_cell_is_profiled(shell):
    found = shell.run_cell_magic("sparse_profile", "model", "y = model(torch.ones(1, 4))\n")
    assert isinstance(found, ModelProfile)
    assert [one.name for one in found.layers] == ["0", "1"]
    assert "y" in shell.user_ns and "<table>" in found._repr_html_()


def test_a_cell_or_line_without_a_model(shell):
    for found in (
        shell.run_cell_magic("sparse_profile", "", "model(torch.ones(1, 4))\n"),
        shell.run_line_magic("sparse_profile", "model(torch.ones(1, 4))"),
    ):
        assert [one.name for one in found.layers] == ["Sequential.0", "Sequential.1"]


def test_a_cell_that_fails_shows_its_error_alone(shell):
    assert shell.run_cell_magic("sparse_profile", "model", "1 / 0\n") is None
    assert not shell.user_ns["model"]._forward_hooks


def test_status_and_report(shell):
    assert isinstance(shell.run_line_magic("sparse_status", ""), Statuses)
    assert isinstance(shell.run_line_magic("sparse_report", "model"), Report)


def test_a_terminal_shows_what_print_prints():
    """IPython's own printer knows data classes and dictionaries, and would take them apart."""
    shell, model = ipython(), Shell().user_ns["model"]
    for found in (
        sparse_bridge.status(),
        sparse_bridge.report(),
        sparse_bridge.report(model),
        sparse_bridge.profile(model, torch.ones(1, 4)),
    ):
        plain = shell.display_formatter.format(found)[0]["text/plain"]
        assert plain == str(found)
