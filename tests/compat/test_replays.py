"""What the matrix says of replays: found by the package's own search, on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

pytest.importorskip("sparse_bridge.core.capture")

from compat import layers, markdown, matrix, replays, report
from compat.replays import Audited, Part, ReplayAudit
from compat.results import Results
from compat.subject import Subject
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.errors import SettingError
from tests.adapters.spconv import apis
from tests.clouds import cloud
from tests.compat.loading import models

RUN = {"date": "2026-01-02 03:04 UTC", "device": "CPU", "versions": {"sparse_bridge": "0.1.0", "commit": None}}
WHOLE = Part("", "Net", 8, "")
CHOSEN = Part("", "Net", 8, "it calls print (net.py:3), which a replay would not repeat [GRAPH_SIDE_EFFECT]")
INNER = Part("encoder", "Encoder", 6, "")
QUICK = [
    ("spconv", "gaussianformer"),
    ("torchsparse", "mmdet3d_minkunet"),
    ("minkowski", "fcgf"),
    pytest.param("minkowski", "rise", marks=pytest.mark.slow),
    ("minkowski", "swin3d"),
]


class Encoder(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Net(nn.Module):
    """A first layer, and four in an encoder; counts its calls where it is told so."""

    def __init__(self, sp, counts):
        super().__init__()
        self.first = sp.SubMConv3d(4, 4, 5, indice_key="first")
        self.encoder = Encoder(*(sp.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(4)))
        self.counts, self.calls = counts, 0

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return self.encoder(self.first(x))


class Toy:
    """As much of a `Subject` as the search asks."""

    def __init__(self, sp, counts=False, fails=()):
        self.sp, self.counts, self.fails = sp, counts, fails

    def network(self):
        return Net(self.sp, self.counts)

    def scene(self, seed):
        return seed

    def run(self, network, seed):
        if seed in self.fails:
            raise ValueError("Expected more than 1 value per channel when training")
        coords = cloud((8, 8, 8), 2, 0.1, seed=seed)
        return network(self.sp.SparseConvTensor(torch.randn(len(coords), 4), coords, [8, 8, 8], 2))


@pytest.fixture(scope="module")
def sp():
    with apis.standin() as module:
        yield module


@pytest.mark.parametrize("train", [False, True])
def test_the_outermost_module_is_tried_first(sp, train):
    assert replays.parts_of(Toy(sp), train, replays.CpuSearch()) == (Part("", "Net", 5, ""),)


@pytest.mark.parametrize("train", [False, True])
def test_inner_modules_are_tried_where_outer_ones_are_refused(sp, train):
    outer, inner = replays.parts_of(Toy(sp, counts=True), train, replays.CpuSearch())
    assert outer.path == "" and "Net.calls" in outer.why and "test_replays.py:" in outer.why
    assert inner == Part("encoder", "Encoder", 4, "")


def test_scenes_with_too_few_voxels_for_a_norm_are_left_out(sp):
    assert replays.parts_of(Toy(sp, fails=(1, 2)), True, replays.CpuSearch()) == (Part("", "Net", 5, ""),)


def test_an_error_that_the_layers_do_not_raise_comes_out(sp):
    toy = Toy(sp)
    toy.calls = 0

    def run(network, seed):
        toy.calls += 1
        if toy.calls == 2:
            raise RuntimeError("no kernel")
        return Toy.run(toy, network, seed)

    toy.run = run
    with pytest.raises(RuntimeError, match="no kernel"):
        replays.parts_of(toy, False, replays.CpuSearch())


def test_nothing_is_left_behind(sp):
    replays.parts_of(Toy(sp), False, replays.CpuSearch())
    assert not graph_regions.tried()


def _records():
    return {one.model: one for one in replays.read().models}


def test_every_model_is_in_the_record():
    assert list(_records()) == [cell.model.name for cell in layers.cells_of()]
    trained = {model.name: model.train for model in matrix.load()}
    assert all((set(one.modes) == set(replays.MODES)) == trained[one.model] for one in _records().values())


@pytest.mark.parametrize(("framework", "name"), QUICK)
def test_the_record_is_what_the_search_finds(framework, name):
    model = next(m for m in matrix.load() if m.framework == framework and m.module.endswith(f".{name}"))
    recorded = _records()[model.name]
    with models(framework, model.profile):
        subject = Subject(model, "cpu", "float32", recorded.size)
        found = {mode: replays.parts_of(subject, mode == "training", replays.CpuSearch()) for mode in recorded.modes}
    assert found == recorded.modes


def test_a_record_survives_the_disk(tmp_path):
    written = ReplayAudit(RUN, (Audited("A", "spconv", "tiny", 8, {"inference": (CHOSEN, INNER), "training": ()}),))
    written.save(tmp_path / "cpu.json")
    assert replays.read(tmp_path / "cpu.json") == written


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"schema": 9}), json.dumps({"schema": 1, "run": {}})])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=r"other\.json does not say what may be replayed"):
        replays.read(path)


def test_the_page_says_what_may_be_replayed_and_why_not():
    names = [model.name for model in matrix.load()][:5]
    modes = [(WHOLE,), (CHOSEN, INNER), (CHOSEN,), ()]
    rows = [Audited(name, "spconv", "tiny", 8, {"inference": one}) for name, one in zip(names, modes, strict=False)]
    found = ReplayAudit(RUN, tuple(rows))
    text = markdown.render(Results((), ()), matrix.load(), found)
    assert "**Audited on a CPU**, without the trial, over the smallest scenes. CPU, 2026-01-02 03:04 UTC: " in text
    assert "- inference: 2 of 4 models, 1 of them with all layers and 1 in part\n" in text
    lines = {
        name: next(line for line in text.splitlines() if f"| {markdown.plain(name)} | spconv" in line) for name in names
    }
    assert "| 8 | all | does not train |" in lines[names[0]]
    assert "| 8 | 6 of 8: `encoder`<sup>[1](#note-1)</sup> |" in lines[names[1]]
    assert "| 8 | none<sup>[1](#note-1)</sup> |" in lines[names[2]]
    assert "| 8 | none<sup>[2](#note-2)</sup> |" in lines[names[3]]
    assert "| not run | not run |" in lines[names[4]]
    assert '1. <a id="note-1"></a>it calls print (net.py:3)' in text.replace("\\_", "_")
    assert report.shares(found.models, "training").startswith("0 of 0 models")


def test_the_page_says_what_a_gpu_replayed():
    """In the place of what a CPU says, which has the models that were not run there."""
    names = [model.name for model in matrix.load()][:3]
    whole, chosen = {"inference": (WHOLE,)}, {"inference": (CHOSEN,)}
    audited = ReplayAudit(RUN, tuple(Audited(name, "spconv", "tiny", 8, whole) for name in names))
    sizes = zip(names, ("small", "tiny"), (whole, chosen), strict=False)
    gpu = ReplayAudit(
        {**RUN, "device": "NVIDIA X"}, tuple(Audited(name, "spconv", size, 8, one) for name, size, one in sizes)
    )
    text = markdown.render(Results((), ()), matrix.load(), audited, [gpu])
    assert "2 models, 1 over small scenes, 1 over tiny scenes" in text and "NVIDIA X, 2026-01-02" in text
    assert "- inference: 1 of 2 models" in text and "- inference: 3 of 3 models" in text
    lines = [line for line in text.splitlines() if line.endswith("does not train |")]
    cells = [line.split(" | ")[3] for line in lines]
    assert cells == ["all", "none<sup>[1](#note-1)</sup>", "on a CPU: all"]


def test_some_models_do_not_replace_the_record(capsys):
    with pytest.raises(SystemExit):
        replays.main(["--model", "SECOND"])
    assert "--model without --json" in capsys.readouterr().err
