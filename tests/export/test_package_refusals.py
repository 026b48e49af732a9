"""What cannot be packaged: one error that says what, why, and what to do. Nothing is compiled."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import __main__ as command_line
from sparse_bridge import export
from sparse_bridge.errors import UnsupportedError
from sparse_bridge.export import ExportError, export_package, package, package_check
from tests.compile.programs import PROGRAMS, scene
from tests.patience import PATIENCE
from tests.releases import since

pytestmark = since(*package.OLDEST, "packages cannot be built")
COMPILE = package.compile_graph


class Plain(nn.Module):
    """A model without sparse layers.  read: makes its result."""

    def __init__(self, read=lambda x: x):
        super().__init__()
        self.read = read

    def forward(self, x, coords):
        return self.read(x + coords.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch, plain_settings):
    def refuse(*ignored):
        raise AssertionError("a model that does not fit was compiled")

    monkeypatch.setattr(package, "compile_graph", refuse)


def refused(model, folder, inputs=None, **more):
    with pytest.raises(ExportError) as error:
        export_package(model, scene(0) if inputs is None else inputs, folder / "out", **more)
    assert not (folder / "out").exists()
    return str(error.value)


def test_an_old_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(package, "RELEASE", (2, 10))
    assert "torch 2.11 or newer" in refused(Plain().eval(), tmp_path)


def test_models_in_training(tmp_path):
    assert "model.eval()" in refused(Plain(), tmp_path)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.ones(5, 4), "inputs is a Tensor; expected a tuple"),
        ((torch.ones(5, 4), 3), "inputs[1] is a int; expected tensors"),
        ((torch.ones(5, 4), torch.ones(5, 4, device="meta")), "is on meta"),
        ((torch.ones(1, 4), torch.ones(1, 4)), "two rows or more"),
    ],
)
def test_inputs_that_do_not_fit(inputs, words, tmp_path):
    assert words in refused(Plain().eval(), tmp_path, inputs)


def test_what_is_no_model(tmp_path):
    assert "the model is a function" in refused(lambda x, coords: x, tmp_path)


def test_scenes_are_looked_at_like_inputs(tmp_path):
    assert "scenes[0][0] is a str" in refused(Plain().eval(), tmp_path, scenes=[("a", "b")])


def test_scenes_of_other_inputs(tmp_path):
    words = refused(Plain().eval(), tmp_path, scenes=[(torch.ones(5, 4),)])
    assert "scenes[0] has 1 inputs; expected 2" in words


def test_results_that_are_no_tensors(tmp_path):
    assert "returned a int" in refused(Plain(lambda x: (x, 1)).eval(), tmp_path)


def test_code_that_decides_by_data(tmp_path, capsys):
    model = Plain(lambda x: x + 1 if x.sum() > 0 else x).eval()
    assert "decides by data" in refused(model, tmp_path)
    assert "def forward" not in capsys.readouterr().err, "torch's graph"


def test_sizes_that_a_model_fixes(tmp_path):
    rows = len(scene(0)[0])
    model = Plain(lambda x: x + torch.ones(rows, 1)).eval()
    assert "torch.export does not take the model" in refused(model, tmp_path)


@pytest.mark.parametrize(
    ("api", "network", "words"),
    [
        ("torchsparse", "three", "maps of torchsparse"),
        ("minkowski", "three", "sparse_bridge::minkowski_insert, which packages do not hold"),
    ],
)
def test_layers_of_other_frameworks(api, network, words, tmp_path):
    with PROGRAMS[api]() as programs:
        assert words in refused(programs[network]().eval(), tmp_path)


def test_forced_dataflows(tmp_path):
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().eval()
        sparse_bridge.dataflow(program, "explicit")
        assert "forced to the dataflow explicit" in refused(program, tmp_path)


def test_models_that_take_any_number_of_inputs(monkeypatch, tmp_path):
    class Any(Plain):
        def forward(self, x, *others):
            return super().forward(x, *others)

    programs = []
    monkeypatch.setattr(package, "compile_graph", lambda program, path: programs.append(program))
    export_package(Any().eval(), scene(0), tmp_path)
    inputs = scene(1)
    assert torch.equal(programs[0].module()(*inputs), Plain()(*inputs))


def test_a_machine_without_a_compiler(tmp_path):
    program = torch.export.export(Plain().eval(), scene(0))
    nowhere = torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "compiler"))})
    with nowhere, pytest.raises(UnsupportedError, match=r"no C\+\+ compiler"):
        COMPILE(program, tmp_path / "model.pt2")


def test_a_machine_without_cmake(monkeypatch, tmp_path):
    monkeypatch.setattr(package_check.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install cmake"):
        package_check.check(tmp_path)


@pytest.mark.skipif(not shutil.which("cmake"), reason="no CMake")
def test_an_example_that_does_not_build(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("message(FATAL_ERROR no)\n")
    with pytest.raises(ExportError, match="does not build"):
        package_check.check(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toaster"], "expected second, unet, or module:function"),
        (["toaster:make"], "No module named 'toaster'"),
        (["./toaster.py:make"], "'./toaster.py' is no module; name it as `import` does"),
        ([".toaster:make"], "'.toaster' is no module"),
        (["secnd"], "or module:function. Did you mean: 'second'?"),
        (["json:dmups"], "has no attribute 'dmups'. Did you mean: 'dumps'?"),
        (["platform:machine"], "returned str; expected (model, inputs)"),
        (["platform:_sys_version_cache"], "is dict; expected a function"),
        (["os.path:join"], "missing a required argument: 'a'; expected a function without arguments"),
        (["platform:machine", "--rows", "5"], "--rows is for second and unet; platform:machine brings"),
    ],
)
def test_commands_that_do_not_fit(words, said, tmp_path, capsys):
    assert command_line.main(["package", *words, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert said in " ".join(shown.split()) and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("def make(:\n", ["def make(:", "SyntaxError"]),
        ("raise AttributeError('mine')\n", ['broken.py", line 1, in <module>', "AttributeError: mine"]),
        ("import nonesuch_module\n", ['broken.py", line 1, in <module>', "No module named 'nonesuch_module'"]),
        ("def make():\n    return 1 / 0\n", ['broken.py", line 2, in make', "ZeroDivisionError"]),
    ],
    ids=["syntax", "import", "needs", "call"],
)
@pytest.mark.slow
def test_a_module_that_raises_is_shown_as_python_would_show_it(program, shown, tmp_path):
    """Without a frame of this package."""
    (tmp_path / "broken.py").write_text(program)
    words = [sys.executable, "-m", "sparse_bridge", "package", "broken:make", "--out", str(tmp_path / "out")]
    paths = os.pathsep.join([str(tmp_path), str(pathlib.Path(command_line.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == 1 and not done.stdout
    assert all(words in done.stderr for words in shown)
    assert str(pathlib.Path(command_line.__file__).parent) not in done.stderr and "importlib" not in done.stderr


@pytest.mark.parametrize("more", (0, 1))
def test_the_model_of_a_module(more, monkeypatch, tmp_path, capsys):
    (tmp_path / "detector.py").write_text(
        "import torch\n"
        "import spconv.pytorch as spconv\n"
        "def make():\n"
        "    layer = spconv.SubMConv3d(4, 4, 3).eval()\n"
        f"    return (layer, [torch.ones(3, 4)], ['more'])[: {2 + more}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "detector", raising=False)
    seen = []
    monkeypatch.setattr(export, "export_package", lambda *args, **named: seen.append((args, named)))
    assert command_line.main(["package", "detector:make", "--out", str(tmp_path / "out")]) == 0
    ((model, inputs, folder), named) = seen[0]
    assert type(model).__name__ == "SubMConv3d" and inputs[0].shape == (3, 4)
    assert folder == tmp_path / "out" and list(named["scenes"]) == ["more"] * more


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert command_line.main(["package", "second", "--out", str(tmp_path / "out")]) == 2
    assert "got a file; expected a folder" in capsys.readouterr().err


def test_packages_need_no_onnx():
    code = "import sys; sys.modules['onnx'] = None; from sparse_bridge.export import export_package"
    subprocess.run([sys.executable, "-c", code], check=True)
