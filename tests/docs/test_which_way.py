"""The page of ways agrees with the code: its switches exist, its lines are what `report()` prints
where a way is taken, and no dataflow is missing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings, state
from sparse_bridge.adapters import call_stats
from sparse_bridge.core.conv import choice
from tests.adapters.spconv import apis
from tests.clouds import cloud

from .pages import ROOT

PAGE = ROOT / "docs" / "which_way.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = [
    cells
    for line in TEXT.splitlines()
    if line.startswith("| ")
    and not line.startswith(("| way ", "| dataflow | "))
    and len(cells := line.strip("| ").split(" | ")) == 4
]
WAYS = {cells[0]: cells for cells in ROWS}
PLACES = {"N": r"\d+", "M": r"\d+", "NAME": r"\w+", "DEVICE": r"\w+", "FLOW": r"\w+"}
COORDS, SHAPE = cloud((24, 24, 24), 1, share=0.3), [24, 24, 24]

Scene = Callable[[], contextlib.AbstractContextManager[object]]
SCENES: dict[str, Scene] = {}


def scene(way: str) -> Callable[[Callable[[], Iterator[object]]], Scene]:
    """A context in which a call has taken the way."""

    def enter(run: Callable[[], Iterator[object]]) -> Scene:
        SCENES[way] = contextlib.contextmanager(run)
        return SCENES[way]

    return enter


class Net(nn.Module):
    def __init__(self, sp) -> None:
        super().__init__()
        self.conv = sp.SubMConv3d(4, 32, 3, indice_key="a")
        self.norm, self.relu = nn.BatchNorm1d(32), nn.ReLU()

    def forward(self, x):
        x = self.conv(x)
        return x.replace_feature(self.relu(self.norm(x.features)))


@contextlib.contextmanager
def called(change: Callable[[nn.Module], nn.Module] = lambda net: net) -> Iterator[nn.Module]:
    """A network in inference that has been called some times, after `change`."""
    with apis.standin() as sp, torch.no_grad():
        net = Net(sp).eval()
        taken = change(net)
        for seed in range(4):
            torch.manual_seed(seed)
            taken(sp.SparseConvTensor(torch.randn(len(COORDS), 4), COORDS, SHAPE, 1))
        yield net


@scene("graph of a whole model")
def replayed() -> Iterator[object]:
    pytest.importorskip("sparse_bridge.core.capture")
    with called(lambda net: sparse_bridge.optimize(net, graphs=True)) as net:
        yield net


@scene("original framework")
def original() -> Iterator[object]:
    call_stats.note("spconv", "SubMConv3d", "a reason")
    yield


@scene("helper in C")
def helped() -> Iterator[object]:
    """On a GPU that is not there."""
    pytest.importorskip("triton")
    from tests.native.recording import Recorder, anew, helper, served
    from tests.native.world import World
    from tests.walk_apis import pretended_gpu

    recorder = Recorder()
    with anew(), recorder.recording(), apis.standin() as sp, torch.no_grad():
        helper()
        world = World(sp, recorder, bias=True)
        with pretended_gpu(), served() as by_helper:
            world(4)
            assert by_helper["known_call"], by_helper
            yield world


@scene("fused with what follows")
def followed() -> Iterator[object]:
    with called() as net:
        yield net


@scene("plan in Python")
def plain() -> Iterator[object]:
    with called() as net:
        yield net


@scene("prefetched")
def streamed() -> Iterator[object]:
    """Maps on a GPU that is not there."""
    pytest.importorskip("triton")
    map_time = pytest.importorskip("tests.core.prefetch.map_time")
    with contextlib.closing(map_time.networks()) as networks:
        _, net, made = next(networks)
        map_time.streamed(net, made, 3)
        yield net


def forced(name: str) -> Scene:
    @contextlib.contextmanager
    def run() -> Iterator[object]:
        with apis.standin(), settings.override(dataflow=name):
            yield

    return run


for name in settings.DATAFLOWS:
    SCENES[name] = forced(name)


@scene("dataflow of a module")
def given() -> Iterator[object]:
    def change(net: nn.Module) -> nn.Module:
        sparse_bridge.dataflow(net.conv, "explicit")
        return net

    with called(change) as net:
        yield net


@scene("tuned group")
def tuned() -> Iterator[object]:
    with mock.patch.object(choice, "used_groups", lambda: {"key": "a map: masked 2 ms"}):
        yield


def lines_of(way: str) -> list[str]:
    """What a row of the page says that `report()` prints, as patterns."""
    places = rf"\b({'|'.join(PLACES)})\b"
    shown = re.findall(r"`([^`]+)`", WAYS[way][3])
    return [
        "".join(PLACES.get(part, re.escape(part)) for part in re.split(places, one))
        for one in shown
        if not one.startswith("no helper in C")  # on a GPU
    ]


def names_of(cell: str) -> list[str]:
    """The way of a row; the dataflows where it names those."""
    names = re.findall(r"`([^`]+)`", cell)
    return names if names and cell.startswith("`") else [cell]


@pytest.fixture(autouse=True)
def _anew(plain_settings):
    state.reset()
    yield
    state.reset()


def shown(way: str) -> bool:
    return not WAYS[way][3].startswith("not shown")


def test_every_way_that_report_shows_has_a_scene() -> None:
    ways = [one for cell in WAYS if shown(cell) for one in names_of(cell)]
    assert sorted(ways) == sorted(SCENES)
    assert len(WAYS) == len(ROWS)


@pytest.mark.parametrize("way", [way for way in WAYS if shown(way)])
def test_report_prints_the_lines_of_the_page(way: str) -> None:
    for name in names_of(way):
        with SCENES[name]():
            text = str(sparse_bridge.report())
        for pattern in lines_of(way):
            if name in settings.DATAFLOWS:
                pattern = pattern.replace(names_of(way)[0], name, 1)
            if pattern.startswith(("queued", "dropped")):  # not in this scene
                assert re.search(pattern, str(sparse_bridge.adapters.ways.MapCount(1, 1, 1)))
            else:
                assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


@pytest.mark.parametrize("way", ["fused with what follows", "helper in C"])
def test_lines_go_with_their_switch(way: str) -> None:
    """What the page says turns a way off takes its line out of the report."""
    if way == "helper in C":
        pytest.importorskip("triton")
        from tests.native.recording import helper

        helper()
    name, value = re.search(r"off: `(SPARSE_BRIDGE_\w+)=([^`]+)`", WAYS[way][2]).groups()
    for on in (True, False):
        settings.reset(settings.from_environment({} if on else {name: value}))
        state.reset()
        with called():
            text = str(sparse_bridge.report())
        assert bool(re.search(lines_of(way)[0], text)) == on, text


def test_every_dataflow_is_on_the_page() -> None:
    flows = [one for cell in WAYS if cell.startswith("`") for one in names_of(cell)]
    assert sorted(flows) == sorted(settings.DATAFLOWS)


def test_switches_exist() -> None:
    """Names and values of today; each variable that chooses a way is there."""
    named = re.findall(r"SPARSE_BRIDGE_(\w+)=([\w=:]+)", TEXT)
    for name, value in named:
        assert name in settings.KEYWORDS
        settings.from_environment({settings.PREFIX + name: value})  # raises for a bad value
    apart = {"FP32", "CACHE_DIR", "RULES"}  # precision, a folder, what frameworks refuse
    assert {name for name, _ in named} == settings.KEYWORDS.keys() - apart
    for name in ("optimize", "restore", "memory_limit", "dataflow", "report", "profile"):
        assert f"{name}" in TEXT and callable(getattr(sparse_bridge, name))


def test_compiled_graphs_hold_operators() -> None:
    """The way that report() does not show is seen as the page says."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    with called(lambda net: torch.compile(net, backend=backend, fullgraph=True)):
        layers = sparse_bridge.report().layers
    torch._dynamo.reset()
    assert "torch.ops.sparse_bridge.conv" in "".join(graphs)
    assert not layers.get("spconv"), "their calls are not counted"


def test_the_example_prints_what_the_page_says() -> None:
    text = re.search(r"```text\n(.*?)```", TEXT, flags=re.S)[1]
    code = re.search(r"```python\n(.*?)```", TEXT, flags=re.S)[1]
    assert apis.python(code).strip() == text.strip()
