"""Made-up source trees, data folders and checkpoints with the projects' names, keys and shapes."""

from __future__ import annotations

import pathlib
import textwrap

import torch

from sparse_bridge.tools.checkpoints.projects import PROJECTS

# What each made-up evaluation does: finds its arguments, computes a published layer, prints.
COMMON = '''
    import os, sys
    import torch
    import spconv.pytorch as spconv

    def layer(weight):
        """The stem of the network on a few sites."""
        cells = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 2, 1, 2]], dtype=torch.int32)
        conv = spconv.SubMConv3d(weight.shape[-1], len(weight), weight.shape[1], bias=False)
        conv.load_state_dict({"weight": weight})
        x = spconv.SparseConvTensor(torch.ones(3, weight.shape[-1]), cells, [9, 9, 9], 1)
        with torch.no_grad():
            return conv(x).features

    def after(option):
        return sys.argv[sys.argv.index(option) + 1]
'''
OPENPCDET = """
    import _init_path
    assert os.path.basename(os.getcwd()) == "tools" and os.path.isfile(after("--cfg_file"))
    assert after("--set") == "DATA_CONFIG.DATA_PATH" and sys.argv[-1].endswith("the data")
    held = torch.load(after("--ckpt"), weights_only=True)["model_state"]
    assert layer(held["backbone_3d.conv_input.0.weight"]).isfinite().all()
    for name, value in (("Car", 78.6), ("Pedestrian", 53.1), ("Cyclist", 67.2)):
        for kind in ("AP", "AP_R40"):
            print(f"{name} {kind}@0.70, 0.70, 0.70:")
            print("bbox AP:90.0000, 89.0000, 88.0000")
            print("bev  AP:90.0000, 88.0000, 86.0000")
            shown = value if kind == "AP" else 1.0
            print(f"3d   AP:88.0000, {shown:.4f}, 77.0000")
        print(f"{name} AP@0.50, 0.50, 0.50:")
        print("3d   AP:99.0000, 98.0000, 97.0000")
"""
POINTCEPT = """
    import pointcept
    options = dict(one.split("=", 1) for one in sys.argv[sys.argv.index("--options") + 1:])
    assert os.path.isfile(after("--config-file")) and os.path.isdir(options["data.test.data_root"])
    held = torch.load(options["weight"], weights_only=True)["state_dict"]
    assert layer(held["module.backbone.conv_input.0.weight"]).isfinite().all()
    open(os.path.join(options["save_path"], "result"), "w").close()
    print("[2026-01-01] Val result: mIoU/mAcc/allAcc 0.1111/0.8/0.9.")
    print("[2026-01-01] Val result: mIoU/mAcc/allAcc 0.7345/0.8123/0.9123")
"""
MMDET3D = """
    assert os.path.isfile(sys.argv[1])
    held = torch.load(sys.argv[2], weights_only=True)["state_dict"]
    assert layer(held["backbone.conv_input.0.0.weight"]).isfinite().all()
    assert sys.argv[-1].startswith("test_dataloader.dataset.data_root=") and sys.argv[-1][-1] == "/"
    print("Epoch(test) [4071/4071]  car: 0.9500  miou: 0.6912  acc: 0.92  acc_cls: 0.75")
"""
SCRIPTS = {"openpcdet": OPENPCDET, "pointcept": POINTCEPT, "mmdet3d": MMDET3D}


def write(path: pathlib.Path, text: str = "") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tree(folder: pathlib.Path, name: str, fails: bool = False):
    """A source tree with the project's entry points."""
    project = PROJECTS[name]
    text = textwrap.dedent(COMMON) + textwrap.dedent(SCRIPTS[name])
    if fails:
        text = "raise SystemExit('no KITTI today')\n"
    write(folder / project.script, text)
    write(folder / project.config, "")
    write(folder / project.package / "__init__.py")
    write(folder / "tools" / "_init_path.py")
    return folder


def data(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A data folder with what the evaluation reads."""
    if name == "openpcdet":
        write(folder / "kitti_infos_val.pkl")
        write(folder / "ImageSets" / "val.txt", "000001\n000002\n")
        for frame in ("000001", "000002"):
            write(folder / "training" / "velodyne" / f"{frame}.bin")
            write(folder / "training" / "calib" / f"{frame}.txt")
    elif name == "pointcept":
        for part in ("coord", "color", "normal", "segment20"):
            write(folder / "val" / "scene0011_00" / f"{part}.npy")
    else:
        write(folder / "semantickitti_infos_val.pkl")
        write(folder / "sequences" / "08" / "velodyne" / "000000.bin")
        write(folder / "sequences" / "08" / "labels" / "000000.label")
    return folder


def state(name: str) -> dict[str, torch.Tensor]:
    """Made-up values under the published keys, and a layer of another part of the model."""
    generator = torch.Generator().manual_seed(0)
    shapes = PROJECTS[name].keys()
    # One number for all but the stem, which a file stores once.
    found = {key: torch.randn((), generator=generator).expand(shape) for key, shape in shapes.items()}
    stem = next(iter(found))
    found[stem] = torch.randn(shapes[stem], generator=generator)
    key = next(key for key in found if key.endswith("running_var"))
    found[key.replace("running_var", "num_batches_tracked")] = torch.tensor(7)
    return {**found, "dense_head.conv_cls.weight": torch.zeros(18, 512, 1, 1)}


def checkpoint(path: pathlib.Path, name: str, held: dict[str, torch.Tensor] | None = None):
    """A file as the project saves it."""
    weights = state(name) if held is None else held
    if name == "openpcdet":
        torch.save({"epoch": 80, "model_state": weights}, path)
    elif name == "pointcept":
        named = {f"module.{key}": value for key, value in weights.items()}
        torch.save({"epoch": 800, "state_dict": named}, path)
    else:
        torch.save({"meta": {"epoch": 36}, "state_dict": weights}, path)
    return path
