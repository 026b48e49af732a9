"""What is known of each project: its evaluation, its data, its published numbers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...errors import SettingError
from . import weights


@dataclasses.dataclass(frozen=True)
class Paths:
    """Absolute paths of one run. scratch: a folder for what the evaluation writes."""

    project: Path
    checkpoint: Path
    data: Path
    scratch: Path


@dataclasses.dataclass(frozen=True)
class Project:
    """One published model.

    Attributes:
        name: on the command line.
        title: for people.
        package: its import name, by which an installed project is found.
        script, config: of its evaluation, below its folder.
        folder: in which the script runs, below its folder.
        arguments: of the script.
        keys: names and shapes of the sparse layers in the published file.
        published: metrics in percent, as `source` has them; None where nothing is published.
        metrics: the same, found in what the evaluation prints.
        data: faults of a data folder.
        tolerance: in percentage points; repeated runs differ less.
    """

    name: str
    title: str
    package: str
    script: str
    config: str
    folder: str
    arguments: Callable[[Paths, str], list[str]]
    keys: Callable[[], dict[str, weights.Shape]]
    published: Mapping[str, float | None]
    source: str
    metrics: Callable[[str], dict[str, float]]
    data: Callable[[Path], Iterator[str]]
    tolerance: float = 0.5


def _second_arguments(paths: Paths, config: str) -> list[str]:
    return [
        "--cfg_file",
        config,
        "--ckpt",
        str(paths.checkpoint),
        "--eval_tag",
        "sparse_bridge",
        "--set",
        "DATA_CONFIG.DATA_PATH",
        str(paths.data),
    ]


def _second_metrics(text: str) -> dict[str, float]:
    """3D average precision at moderate difficulty and 11 recall positions; the first block of a
    class is the one with its strict overlap."""
    precisions: dict[str, float] = {}
    block = re.compile(r"(\w+) AP@[^\n]*\n(?:[^\n]*\n)*?[^\n]*3d +AP: *[\d.]+, *([\d.]+)")
    for name, moderate in block.findall(text):
        precisions.setdefault(name, float(moderate))
    return precisions


def _kitti(folder: Path) -> Iterator[str]:
    if not (folder / "kitti_infos_val.pkl").is_file():
        yield "kitti_infos_val.pkl is missing (OpenPCDet's create_kitti_infos makes it)"
    names = folder / "ImageSets" / "val.txt"
    if not names.is_file():
        yield "ImageSets/val.txt is missing"
        return
    frames = names.read_text(encoding="utf-8").split()
    for sensor, ending in (("velodyne", "bin"), ("calib", "txt")):
        files = [f"training/{sensor}/{frame}.{ending}" for frame in frames]
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            yield f"{len(missing):,} of {len(files):,} frames are missing, first {missing[0]}"


def _spunet_arguments(paths: Paths, config: str) -> list[str]:
    return [
        "--config-file",
        config,
        "--options",
        f"save_path={paths.scratch}",
        f"weight={paths.checkpoint}",
        f"data.test.data_root={paths.data}",
    ]


def _spunet_metrics(text: str) -> dict[str, float]:
    values = re.findall(r"Val result: mIoU/mAcc/allAcc ([\d.]+)/[\d.]+/[\d.]+", text)
    return {"mIoU": 100 * float(values[-1].rstrip("."))} if values else {}


def _scannet(folder: Path) -> Iterator[str]:
    scenes = sorted((folder / "val").glob("*"))
    if not scenes:
        yield "val/ holds no scene (Pointcept's preprocess_scannet makes val/SCENE/coord.npy)"
    for scene in scenes:
        lacking = [
            name
            for name in ("coord.npy", "color.npy", "normal.npy", "segment20.npy")
            if scene.suffix != ".pth" and not (scene / name).is_file()
        ]
        if lacking:
            yield f"val/{scene.name} lacks {', '.join(lacking)}"
            return


def _minkunet_arguments(paths: Paths, config: str) -> list[str]:
    return [
        config,
        str(paths.checkpoint),
        "--work-dir",
        str(paths.scratch),
        "--cfg-options",
        f"test_dataloader.dataset.data_root={paths.data}/",
    ]


def _minkunet_metrics(text: str) -> dict[str, float]:
    values = re.findall(r"\bmiou: ([\d.]+)", text)
    return {"mIoU": 100 * float(values[-1])} if values else {}


def _semantic_kitti(folder: Path) -> Iterator[str]:
    if not (folder / "semantickitti_infos_val.pkl").is_file():
        yield "semantickitti_infos_val.pkl is missing (mmdet3d's create_data makes it)"
    for part, ending in (("velodyne", "bin"), ("labels", "label")):
        if not any((folder / "sequences" / "08" / part).glob(f"*.{ending}")):
            yield f"sequences/08/{part} holds no .{ending} file"


_ZOO = "configs/minkunet/README.md"
_MINKUNET = Project(
    name="mmdet3d",
    title="MinkUNet34-W32 of mmdet3d, spconv backend, on SemanticKITTI",
    package="mmdet3d",
    script="tools/test.py",
    config="configs/minkunet/minkunet34_w32_spconv_8xb2-laser-polar-mix-3x_semantickitti.py",
    folder=".",
    arguments=_minkunet_arguments,
    keys=weights.minkunet34,
    published={"mIoU": 69.3},
    source=f"mmdet3d, {_ZOO}",
    metrics=_minkunet_metrics,
    data=_semantic_kitti,
)

PROJECTS = {
    project.name: project
    for project in (
        Project(
            name="openpcdet",
            title="SECOND of OpenPCDet on KITTI",
            package="pcdet",
            script="tools/test.py",
            config="tools/cfgs/kitti_models/second.yaml",
            folder="tools",
            arguments=_second_arguments,
            keys=weights.second,
            published={"Car": 78.62, "Pedestrian": 52.98, "Cyclist": 67.15},
            source="OpenPCDet, README.md: 3D AP, moderate, 11 recall positions",
            metrics=_second_metrics,
            data=_kitti,
        ),
        Project(
            name="pointcept",
            title="SpUNet-v1m1 of Pointcept on ScanNet",
            package="pointcept",
            script="tools/test.py",
            config="configs/scannet/semseg-spunet-v1m1-0-base.py",
            folder=".",
            arguments=_spunet_arguments,
            keys=weights.spunet,
            published={"mIoU": None},
            source="the training log of the file",
            metrics=_spunet_metrics,
            data=_scannet,
        ),
        _MINKUNET,
        dataclasses.replace(
            _MINKUNET,
            name="mmdet3d-amp",
            title="MinkUNet34-W32 of mmdet3d, spconv backend, mixed precision, on SemanticKITTI",
            config=_MINKUNET.config.replace("8xb2-", "8xb2-amp-"),
            published={"mIoU": 68.3},
        ),
    )
}


def locate(project: Project, tree: Path | None) -> Path:
    """The folder that holds the project's evaluation, absolute.

    tree: by the user; None: where the installed package lies.
    Raises: SettingError, with what is missing.
    """
    if tree is not None:
        folder = tree.resolve()
        wanted = (project.script, project.config)
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise SettingError(
                f"--project {tree} lacks {' and '.join(missing)}; expected the source tree that has {project.title}."
            )
        return folder
    spec = importlib.util.find_spec(project.package)
    places = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    for package in places:
        for folder in (package.parent, package / ".mim"):  # .mim: in wheels of OpenMMLab's projects
            if (folder / project.script).is_file() and (folder / project.config).is_file():
                return folder.resolve()
    where = "is not installed" if spec is None else f"is installed without {project.script}"
    raise SettingError(f"{project.package} {where}; give its source tree with --project DIR.")
