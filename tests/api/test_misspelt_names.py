"""Names that do not exist, where one that does is spelt like them: layers, frameworks, settings, variables."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import pytest

import sparse_bridge
from sparse_bridge import names, settings
from sparse_bridge.errors import DataTypeError, SettingError
from tests.patience import PATIENCE


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sparse_bridge.enable("spconv", mode="stand-in"), "mode is 'stand-in'.*Did you mean: 'standin'"),
        (lambda: sparse_bridge.enable("spconv", optimize="fused"), "optimize is 'fused'.*Did you mean: 'fuse'"),
        (lambda: sparse_bridge.convert(None, to="TorchSparse"), "to='TorchSparse'.*Did you mean: 'torchsparse'"),
    ],
)
def test_values_of_arguments_get_a_hint(call, said):
    with pytest.raises(SettingError, match=said):
        call()


def test_a_name_of_another_case_is_meant_and_a_far_one_is_not():
    assert names.meant("SubMConv3D", ["SparseConv3d", "SubMConv3d"]) == " Did you mean: 'SubMConv3d'?"
    common = ["MinkowskiCommon", "MinkowskiConvolution", "MinkowskiConvolutionTranspose"]
    assert names.meant("MinkowskiConv", common) == " Did you mean: 'MinkowskiConvolution'?"
    assert names.meant("DATAFLW", ["DATAFLOW", "FP32"], "PRE_") == " Did you mean: 'PRE_DATAFLOW'?"
    assert names.meant("FOO", ["DATAFLOW", "FP32"]) == names.meant("_enable", ["enable"]) == ""


def test_what_is_meant_is_looked_for_only_where_it_is_read():
    asked = []
    error = names.MissingNameError("package", "enble", lambda: asked.append(1) or ["enable"])
    assert not asked
    assert str(error) == "module 'package' has no attribute 'enble'. Did you mean: 'enable'?"
    assert (error.name, error.obj) == ("enble", None), "else the interpreter adds its own suggestion"
    assert type(pickle.loads(pickle.dumps(error))) is AttributeError and asked


LAYERS = """
import importlib, sparse_bridge
sparse_bridge.enable("spconv", "torchsparse", "minkowski", "flex_gemm", mode="standin")
for module, name, meant in (
    ("MinkowskiEngine", "MinkowskiConvolutoin", "MinkowskiConvolution"),
    ("MinkowskiEngine.MinkowskiOps", "to_sparze", "to_sparse"),
    ("spconv.pytorch", "SubMConv3D", "SubMConv3d"),
    ("spconv.pytorch.utils", "PointToVoxels", "PointToVoxel"),
    ("torchsparse", "SparseTensro", "SparseTensor"),
    ("torchsparse.nn", "Conv3D", "Conv3d"),
    ("torchsparse.nn.functional", "spdownsmaple", "spdownsample"),
    ("flex_gemm", "opss", "ops"),
):
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    try:
        getattr(found, name)
    except AttributeError as error:
        assert str(error) == f"module {module!r} has no attribute {name!r}. Did you mean: {meant!r}?", error
    try:
        getattr(found, "nothing_alike")
    except AttributeError as error:
        assert str(error) == f"module {module!r} has no attribute 'nothing_alike'", error
try:
    import spconv.pytroch
except ModuleNotFoundError as error:
    assert str(error).endswith("Did you mean: 'pytorch'?"), error
import MinkowskiEngine, spconv.algo, torchsparse
assert MinkowskiEngine.__version__ and torchsparse.__version__, "what a module answers itself"
try:
    spconv.algo.nothing
except AttributeError as error:
    assert "compiled code" in str(error)
"""


@pytest.mark.slow
def test_misspelt_layers_and_modules_of_every_standin():
    folder = pathlib.Path(sparse_bridge.__file__).parents[1]
    subprocess.run([sys.executable, "-c", LAYERS], cwd=folder, timeout=PATIENCE, check=True)


def test_misspelt_frameworks_and_settings():
    with pytest.raises(SettingError, match=r"framework 'spcnv' is unknown; .* Did you mean: 'spconv'\?"):
        sparse_bridge.enable("spcnv")
    with pytest.raises(SettingError, match=r"framework \['spconv'\]; expected names"):
        sparse_bridge.enable(["spconv"])
    with pytest.raises(SettingError, match=r"unknown setting 'dataflw'.* Did you mean: 'dataflow'\?"):
        sparse_bridge.update_settings(dataflw="masked")
    with pytest.raises(SettingError, match=r"dataflow is 'maskd'; .* Did you mean: 'masked'\?"):
        sparse_bridge.update_settings(dataflow="maskd")


def test_a_variable_that_nothing_reads_is_named_once(monkeypatch):
    monkeypatch.setattr(settings, "_told", set())
    for name in ("DATAFLW", "FOO", "TEST_ARCH", "INHERITED", "FP32"):
        monkeypatch.setenv(f"SPARSE_BRIDGE_{name}", "auto")
    monkeypatch.delenv("SPARSE_BRIDGE_INHERITED")
    monkeypatch.setenv("sparse_bridge_tune", "off")
    monkeypatch.setenv("SPARSEBRIDGE_CAPTURE", "off")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            sparse_bridge.enable("spconv").disable()
    texts = [str(one.message) for one in said if "no such setting" in str(one.message)]
    assert texts == [
        "SPARSEBRIDGE_CAPTURE is set, but sparse_bridge has no such setting. Did you mean: 'SPARSE_BRIDGE_CAPTURE'?",
        "SPARSE_BRIDGE_DATAFLW is set, but sparse_bridge has no such setting. Did you mean: 'SPARSE_BRIDGE_DATAFLOW'?",
        "SPARSE_BRIDGE_FOO is set, but sparse_bridge has no such setting.",
        "sparse_bridge_tune is set, but sparse_bridge has no such setting. Did you mean: 'SPARSE_BRIDGE_TUNE'?",
    ]
    assert all(one.filename == __file__ for one in said if "no such setting" in str(one.message))


def test_a_variable_of_earlier_releases_is_named_where_settings_are_first_read(monkeypatch, plain_settings):
    monkeypatch.setenv("SPARSE_BRIDGE_STRICT", "1")
    for first in (lambda: sparse_bridge.enable("spconv"), sparse_bridge.settings.get, sparse_bridge.update_settings):
        settings.reset()
        with pytest.warns(FutureWarning, match="SPARSE_BRIDGE_STRICT is called") as said:
            first()
        assert {one.filename for one in said} == {__file__}
    sparse_bridge.disable()


def test_of_a_command_no_line_of_ours_is_to_blame(tmp_path):
    (tmp_path / "program.py").write_text("")
    names = {"SPARSE_BRIDGE_STRICT": "0", "SPARSE_BRIDGE_STRCT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "sparse_bridge", "run", "--framework", "torchsparse", str(tmp_path / "program.py")],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    said = [line for line in done.stderr.splitlines() if "Warning: " in line]
    assert done.returncode == 0 and len(said) == 2, done.stderr
    assert all(line.startswith("sys:1: ") for line in said)


@pytest.mark.parametrize("value", [3, None, [], int])
def test_what_is_no_module_is_refused_by_type(value):
    calls = [sparse_bridge.optimize, sparse_bridge.restore, sparse_bridge.checkpoint]
    calls += [lambda model: sparse_bridge.dataflow(model, "masked"), sparse_bridge.compile.fuse]
    calls += [sparse_bridge.compile.needed, lambda model: sparse_bridge.export.export_onnx(model, ())]
    for call in calls:
        with pytest.raises(DataTypeError, match=rf"got {type(value).__name__}; expected "):
            call(value)
