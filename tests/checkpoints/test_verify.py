"""`verify`, on checkpoints with the published keys and shapes and made-up values, and on made-up
trees with the projects' entry points. Nothing here evaluates a real project."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.tools.checkpoints import weights
from sparse_bridge.tools.checkpoints.projects import PROJECTS
from tests.compat.spconv.conftest import library, loaded  # noqa: F401
from tests.compat.spconv.small import module_of

from . import made_up

NAMES = list(made_up.SCRIPTS)


@pytest.fixture
def place(tmp_path):
    """(name, arguments of the command) with everything in order."""

    def make(name, **tree):
        folder = tmp_path / "the project"
        made_up.tree(folder, name, **tree)
        made_up.data(tmp_path / "the data", name)
        made_up.checkpoint(tmp_path / "model.pth", name)
        return [
            "verify",
            name,
            "--project",
            str(folder),
            "--checkpoint",
            str(tmp_path / "model.pth"),
            "--data",
            str(tmp_path / "the data"),
        ]

    return make


EXPECT = {"pointcept": ["--expect", "mIoU=73.5"]}


@pytest.mark.parametrize(
    "name", [name if name == "openpcdet" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_metric_stands_beside_the_published_one(name, place, capsys):
    assert command_line.main([*place(name), *EXPECT.get(name, [])]) == 0
    shown = capsys.readouterr()
    assert PROJECTS[name].title in shown.out and "reached" in shown.out
    values = {
        "openpcdet": ("78.62", "78.60", "-0.02", "67.15", "67.20"),
        "pointcept": ("73.50", "73.45", "-0.05"),
        "mmdet3d": ("69.30", "69.12", "-0.18"),
    }
    assert all(value in shown.out for value in values[name])
    assert "keys of sparse layers as published" in shown.err
    assert "spconv" in shown.err and "SubMConv3d" in shown.err, "the report of what was bridged"


PRINTED = "".join(
    f"{name} AP@0.70, 0.70, 0.70:\nbev  AP:9, 9, 9\n3d   AP:88.0, {value}, 77.0\n"
    for name, value in (("Car", 78.9), ("Pedestrian", 53.0), ("Cyclist", 60.0))
)


@pytest.fixture
def evaluated(monkeypatch):
    """Where the evaluation would run; it prints `PRINTED` instead."""
    seen = []

    def pretend(project, paths, trusted, show):
        seen.append(paths)
        return PRINTED

    monkeypatch.setattr("sparse_bridge.tools.checkpoints.command.evaluate", pretend)
    return seen


def test_a_metric_that_differs_is_exit_status_1(place, capsys, evaluated):
    arguments = place("openpcdet")
    assert command_line.main([*arguments, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["metrics"]["Cyclist"] == {"published": 67.15, "here": 60.0, "reached": False}
    assert facts["metrics"]["Car"]["reached"] and facts["weights"]["layout"] == "KRSC"
    assert command_line.main([*arguments, "--tolerance", "8"]) == 0
    assert command_line.main([*arguments, "--expect", "Cyclist=60.2"]) == 0
    assert command_line.main([*arguments, "--tolerance", "0.1"]) == 1
    assert "differs" in capsys.readouterr().out


def test_a_metric_that_is_not_printed_is_exit_status_1(place, capsys, monkeypatch):
    monkeypatch.setattr("sparse_bridge.tools.checkpoints.command.evaluate", lambda *given: "nothing\n")
    assert command_line.main(place("openpcdet")) == 1
    assert "not printed" in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_that_fails_is_exit_status_1(place, capsys):
    assert command_line.main(place("openpcdet", fails=True)) == 1
    shown = capsys.readouterr()
    assert "ended with exit status 1" in shown.err and "no KITTI today" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("name", NAMES)
def test_check_needs_no_project(name, place, capsys, monkeypatch):
    monkeypatch.setattr("sparse_bridge.tools.checkpoints.command.evaluate", None)
    arguments = place(name)
    place_of_project = arguments.index("--project")
    del arguments[place_of_project : place_of_project + 2]
    assert command_line.main([*arguments, "--check"]) == 0
    assert "Nothing was evaluated" in capsys.readouterr().out
    assert command_line.main([*arguments, "--check", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["metrics"] is None and facts["weights"]["others"] == 2


def refused(arguments, capsys):
    """The one line of a refusal."""
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("sparse_bridge: ")
    return last


def test_a_missing_project(place, capsys, tmp_path):
    arguments = place("openpcdet")
    at = arguments.index("--project")
    line = refused(arguments[:at] + arguments[at + 2 :], capsys)
    assert "pcdet is not installed; give its source tree with --project DIR" in line
    arguments[at + 1] = str(tmp_path)
    line = refused(arguments, capsys)
    assert "lacks tools/test.py and tools/cfgs/kitti_models/second.yaml" in line


@pytest.mark.parametrize(("name", "inner"), [("openpcdet", "."), ("mmdet3d", "mmdet3d/.mim")])
def test_an_installed_project_is_found(name, inner, place, tmp_path, monkeypatch, evaluated):
    """Beside its package, or inside of it as wheels of mmdet3d have it."""
    arguments = place(name)
    at = arguments.index("--project")
    tree = tmp_path / "site"
    made_up.write(tree / PROJECTS[name].package / "__init__.py")
    made_up.tree(tree / inner, name)
    monkeypatch.syspath_prepend(str(tree))
    command_line.main(arguments[:at] + arguments[at + 2 :])
    assert [one.project for one in evaluated] == [(tree / inner).resolve()]
    assert PROJECTS[name].package not in sys.modules, "it runs in a process of its own"


def test_wrong_weights_are_counted_and_named(place, capsys, tmp_path):
    arguments = place("openpcdet")
    file = tmp_path / "model.pth"
    held = made_up.state("openpcdet")
    for key in [key for key in held if key.startswith("backbone_3d.conv4")]:
        del held[key]
    held["backbone_3d.conv1.0.0.weight"] = torch.zeros(32, 3, 3, 3, 16)
    held["backbone_3d.conv5.0.0.weight"] = torch.zeros(1)
    made_up.checkpoint(file, "openpcdet", held)
    line = refused(arguments, capsys)
    assert "15 of 60 keys are missing (backbone_3d.conv4.0.0.weight, " in line
    assert "1 have another shape (backbone_3d.conv1.0.0.weight [32, 3, 3, 3, 16] for [16" in line
    assert "1 belong to other layers (backbone_3d.conv5.0.0.weight)" in line
    made_up.checkpoint(file, "openpcdet", made_up.state("pointcept"))
    assert "60 of 60 keys are missing" in refused(arguments, capsys)


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_older_layouts_are_known(layout, tmp_path):
    order = {"KRSC": (0, 1, 2, 3, 4), "RSKC": (1, 2, 3, 0, 4), "RSCK": (1, 2, 3, 4, 0)}[layout]
    held = {
        key: value.permute(order) if value.ndim == 5 else value for key, value in made_up.state("openpcdet").items()
    }
    found = weights.load(made_up.checkpoint(tmp_path / "old.pth", "openpcdet", held), False)
    checked = weights.compare(found, weights.second(), "SECOND")
    assert checked.layout == layout and checked.keys == 60


def test_mixed_layouts_are_refused():
    shapes = dict(weights.second())
    shapes["backbone_3d.conv_input.0.weight"] = (3, 3, 3, 4, 16)
    with pytest.raises(weights.ShapeError, match="different layouts"):
        weights.compare(shapes, weights.second(), "SECOND")


class Elaborate:
    """More than a tensor."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "is no checkpoint that torch reads"),
        (b"<html>quota exceeded</html>", "pass --trust"),
        ({"model_state": {}}, "holds a dict without weights"),
        ([1, 2], "holds a list without weights"),
        ({"model_state": {"a": torch.zeros(1)}, "more": Elaborate()}, "pass --trust"),
    ],
    ids=["absent", "empty", "html", "no weights", "list", "objects"],
)
def test_files_that_are_no_checkpoints(content, message, place, capsys, tmp_path):
    arguments = place("openpcdet")
    file = tmp_path / "model.pth"
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    assert message in refused(arguments, capsys)


def test_trusted_files_are_unpickled(tmp_path):
    file = tmp_path / "model.pth"
    torch.save({"model_state": {"a": torch.zeros(1)}, "more": Elaborate()}, file)
    assert weights.load(file, True) == {"a": (1,)}
    file.write_bytes(b"<html>quota exceeded</html>")
    with pytest.raises(weights.DataTypeError, match="is no checkpoint"):
        weights.load(file, True)


@pytest.mark.parametrize(
    ("name", "lost", "message"),
    [
        ("openpcdet", "kitti_infos_val.pkl", "kitti_infos_val.pkl is missing"),
        ("openpcdet", "ImageSets/val.txt", "ImageSets/val.txt is missing"),
        ("openpcdet", "training/velodyne/000002.bin", "1 of 2 frames are missing, first training"),
        ("pointcept", "val/scene0011_00/normal.npy", "val/scene0011_00 lacks normal.npy"),
        ("mmdet3d", "semantickitti_infos_val.pkl", "semantickitti_infos_val.pkl is missing"),
        ("mmdet3d", "sequences/08/labels/000000.label", "sequences/08/labels holds no .label"),
    ],
)
def test_a_wrong_data_folder(name, lost, message, place, capsys, tmp_path):
    arguments = place(name)
    (tmp_path / "the data" / lost).unlink()
    assert message in refused([*arguments, *EXPECT.get(name, [])], capsys)


def test_other_wrong_arguments(place, capsys, tmp_path):
    arguments = place("pointcept")
    assert "give the one in the training log of the file: --expect mIoU" in refused(arguments, capsys)
    for wrong in ("mIoU", "mIoU=high", "mAP=3", "mIoU=nan"):
        assert "expected METRIC=PERCENT with one of mIoU" in refused([*arguments, "--expect", wrong], capsys)
    arguments += EXPECT["pointcept"]
    assert "percentage points" in refused([*arguments, "--tolerance", "-1"], capsys)
    arguments[arguments.index("--data") + 1] = str(tmp_path / "nowhere")
    assert "there is no such folder" in refused(arguments, capsys)
    with pytest.raises(SystemExit):
        command_line.main(["verify", "yolo"])


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_are_those_of_the_models(name, library):  # noqa: F811
    """The networks of the compatibility matrix have them, and no other sparse layer."""
    if name == "openpcdet":
        built, top = module_of("second").build(), ""
    elif name == "pointcept":
        built, top = module_of("spunet").build(), "backbone."
    else:
        made = module_of("mmdet3d_minkunet")
        built, top = made.MinkUNetBackbone(4, encoder_blocks=(2, 3, 4, 6)), "backbone."
    have = {
        top + key: tuple(value.shape)
        for key, value in built.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    assert have == PROJECTS[name].keys()
