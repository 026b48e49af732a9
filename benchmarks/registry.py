"""Every case that is timed: what runs, on which scene, in which dtype; and the suites they make up.

A case's name is `suite/scene/subject/dtype/work`; `--case` takes shell patterns over it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.networks.torchsparse import BACKBONES

from .workloads import VOXEL_SIZE, scene_name

__all__ = ["DTYPES", "SUITES", "WORKS", "Case", "Selection", "enumerate_cases"]

DTYPES = ("fp16", "bf16", "fp32", "tf32")  # fp32 is IEEE; tf32 is fp32 data in TF32 products

# What is timed, and how tables call it.
WORKS = {
    "forward": "forward, cached map",
    "fresh": "fresh map + forward",
    "train": "forward + backward, cached map",
    "infer": "inference",
    "autocast": "inference under autocast",
    "step": "training step",
    "issue-forward": "host: forward, cached map",
    "issue-fresh": "host: fresh map + forward",
    "issue-block": "host: conv + norm + ReLU, cached map",
    "issue-train": "host: forward for training, cached map",
    "issue-network": "host: inference, per layer",
    "stream": "stream of new shapes, inference",
    "stream-step": "stream of new shapes, training step",
    "stream-fixed": "stream of one shape, inference",
    "stream-fixed-step": "stream of one shape, training step",
    "cold-infer": "first inference",
    "cold-step": "first training step",
}

LAYER_CHANNELS = (16, 32, 64, 128, 256)
FEW_CHANNELS = (32, 64, 128)
CPU_CHANNELS = (16, 32, 64, 128)
CPU_FEW_ROWS = (500, 2000)  # where the calls that a new map takes weigh more than their work
SHELLS = ((16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64))
SCALE_ROWS = tuple(1000 * 4**power for power in range(7)) + (8_000_000,)
SCALE_CHANNELS = (16, 32, 64, 128, 256, 512, 1024)
LAYER_WORKS = ("forward", "fresh", "train")
NETWORK_NAMES = ("second", "unet")


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        suite: one of SUITES.
        source, batch, voxel_size: the scene, as `workloads.load` takes it; a stream has several
            sources with "+" between them.
        dtype: one of DTYPES.
        work: a key of WORKS.
        channels: C_in = C_out of a layer; 0 for a network.
        network: a key of `peers.NETWORKS`, or of torchsparse's `BACKBONES`; empty for a layer.
        device: "cpu" or "cuda".
        threads: of the CPU; 0 leaves them alone.
        timed: False measures memory alone.
    """

    suite: str
    source: str
    batch: int
    dtype: str
    work: str
    channels: int = 0
    network: str = ""
    device: str = "cuda"
    threads: int = 0
    timed: bool = True
    voxel_size: float = VOXEL_SIZE

    @property
    def scene(self) -> str:
        return scene_name(self.source, self.batch)

    @property
    def subject(self) -> str:
        subject = self.network or f"c{self.channels}"
        return f"{subject}-t{self.threads}" if self.threads else subject

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.scene}/{self.subject}/{self.dtype}/{self.work}"

    @property
    def cold(self) -> bool:
        """Needs new processes with empty caches."""
        return self.work.startswith("cold-")

    @property
    def trains(self) -> bool:
        return self.work == "train" or self.work.endswith("step")

    @property
    def streams(self) -> bool:
        """Every call gets a new scene."""
        return self.work.startswith("stream")


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the command line asks for.

    `scans`: sources; the first one is also run as a batch. `patterns`: shell patterns over names;
    empty selects all.
    """

    suites: Sequence[str]
    scans: Sequence[str]
    dtypes: Sequence[str]
    device: str
    threads: Sequence[int] = (1, 2)
    patterns: Sequence[str] = ()
    voxel_size: float = VOXEL_SIZE


def _layers(wanted: Selection) -> Iterator[Case]:
    first, *others = wanted.scans
    scenes = [(first, 1, LAYER_CHANNELS), (first, 8, FEW_CHANNELS)]
    scenes += [(other, 1, FEW_CHANNELS) for other in others]
    for dtype in wanted.dtypes:
        for source, batch, widths in scenes:
            for channels in widths:
                for work in LAYER_WORKS:
                    yield Case("layers", source, batch, dtype, work, channels)


def _shells(wanted: Selection) -> Iterator[Case]:
    for dtype in wanted.dtypes:
        for res, channels in SHELLS:
            for work in LAYER_WORKS:
                yield Case("shells", f"shell:{res}", 1, dtype, work, channels)


def _network_scenes(wanted: Selection) -> list[tuple[str, int]]:
    """The first scan, the others, and four of the first."""
    return [(source, 1) for source in wanted.scans] + [(wanted.scans[0], 4)]


def _networks(wanted: Selection) -> Iterator[Case]:
    for dtype in wanted.dtypes:
        for source, batch in _network_scenes(wanted):
            for network in NETWORK_NAMES:
                for work in ("infer", "step", "autocast"):
                    # Without reduced precision there is nothing to cast.
                    if work != "autocast" or dtype in ("fp16", "bf16"):
                        yield Case("networks", source, batch, dtype, work, network=network)


def _stream(wanted: Selection) -> Iterator[Case]:
    """All scans in turns; detectors see one shape, segmentation a new one per scene."""
    source = "+".join(wanted.scans)
    for dtype in wanted.dtypes:
        for batch in (1, 4):
            for network, works in (
                ("unet", ("stream", "stream-step", "stream-fixed")),
                ("second", ("stream-fixed", "stream-fixed-step")),
            ):
                for work in works:
                    yield Case("stream", source, batch, dtype, work, network=network)


def _backbones(wanted: Selection) -> Iterator[Case]:
    """Those of torchsparse, alone and in a stream, beside SECOND: the yardstick for machines."""
    source = "+".join(wanted.scans)
    for dtype in wanted.dtypes:
        for scan in wanted.scans:
            for network in ("second", *BACKBONES):
                yield Case("backbones", scan, 1, dtype, "infer", network=network)
        yield Case("backbones", source, 1, dtype, "stream-fixed", network="second")
        for network in BACKBONES:
            yield Case("backbones", source, 1, dtype, "stream", network=network)


def _memory(wanted: Selection) -> Iterator[Case]:
    for dtype in wanted.dtypes:
        for source, batch in _network_scenes(wanted):
            for network in NETWORK_NAMES:
                for work in ("infer", "step"):
                    yield Case("memory", source, batch, dtype, work, network=network, timed=False)


def _cold(wanted: Selection) -> Iterator[Case]:
    for work in ("cold-infer", "cold-step"):
        for dtype in wanted.dtypes:
            yield Case("cold", wanted.scans[0], 1, dtype, work, network="second")


def _scale(wanted: Selection) -> Iterator[Case]:
    for dtype in wanted.dtypes:
        for rows in SCALE_ROWS:
            for work in LAYER_WORKS:
                yield Case("scale", f"sheet:{rows}", 1, dtype, work, 64)
        for channels in SCALE_CHANNELS:
            for work in ("forward", "train"):
                yield Case("scale", "sheet:100000", 1, dtype, work, channels)
        # Rows x channels beyond 2^31 elements.
        for work in ("forward", "train"):
            yield Case("scale", f"sheet:{SCALE_ROWS[-1]}", 1, dtype, work, 320)


def _host(wanted: Selection) -> Iterator[Case]:
    works = ("issue-forward", "issue-block", "issue-train", "issue-fresh")
    for dtype in wanted.dtypes:
        for work in works:
            yield Case("host", "sheet:1000", 1, dtype, work, 32)
        for network in NETWORK_NAMES:
            for source in (wanted.scans[-1], "sheet:1000"):
                yield Case("host", source, 1, dtype, "issue-network", network=network)


def _cpu(wanted: Selection) -> Iterator[Case]:
    for threads in wanted.threads:
        for channels in CPU_CHANNELS:
            for work in LAYER_WORKS:
                yield Case("cpu", wanted.scans[-1], 1, "fp32", work, channels, device="cpu", threads=threads)
        for rows in CPU_FEW_ROWS:
            for channels in CPU_CHANNELS[:2]:
                yield Case("cpu", f"sheet:{rows}", 1, "fp32", "fresh", channels, device="cpu", threads=threads)
        for network in NETWORK_NAMES:
            for work in ("infer", "step"):
                yield Case("cpu", wanted.scans[-1], 1, "fp32", work, network=network, device="cpu", threads=threads)


_BUILDERS = {
    "stream": _stream,
    "layers": _layers,
    "shells": _shells,
    "networks": _networks,
    "backbones": _backbones,
    "memory": _memory,
    "cold": _cold,
    "scale": _scale,
    "cpu": _cpu,
    "host": _host,
}
SUITES = tuple(_BUILDERS)


def enumerate_cases(wanted: Selection) -> list[Case]:
    """The cases of the suites, in the order in which they run.

    Raises:
        SettingError: an unknown suite or dtype, or no case is left.
    """
    for given, known in ((wanted.suites, SUITES), (wanted.dtypes, DTYPES)):
        for one in given:
            if one not in known:
                raise SettingError(f"got {one!r}; expected one of {', '.join(known)}.")
    found: dict[str, Case] = {}
    for suite in wanted.suites:
        for case in _BUILDERS[suite](wanted):
            device = "cpu" if suite == "cpu" else wanted.device
            case = dataclasses.replace(case, device=device, voxel_size=wanted.voxel_size)
            if not wanted.patterns or any(fnmatch.fnmatchcase(case.name, pattern) for pattern in wanted.patterns):
                found.setdefault(case.name, case)
    if not found:
        raise SettingError(
            f"no case of {', '.join(wanted.suites)} matches {' '.join(wanted.patterns)}; "
            "expected shell patterns such as 'layers/*/c64/*'. --list shows the names."
        )
    return list(found.values())
