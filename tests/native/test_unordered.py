"""Layers over maps that nobody has ordered, and weights that kernels read as copies: the helper's launches are those of
Python."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge.core.conv import choice, registry
from sparse_bridge.core.conv.dataflows import masked
from sparse_bridge.core.conv.epilogue import Epilogue
from sparse_bridge.core.conv.kernel_products import GatherProduct
from sparse_bridge.core.conv.layers import convolve_layer, histories
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.core.maps.kernel_map import KernelMap
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.runtime.parts import Part
from tests.fake_driver import Launch
from tests.native.recording import Recorder, anew, helper, served, values_of, way
from tests.walk_apis import pretended_gpu

OPERANDS = 9  # x, w, six of the epilogue, y
ROWS, WIDTH = 90, 16
FORM = ConvForm("ovi")
RELU = Epilogue(activation="relu")  # all that follows is known, so that the layer is launched at its call


class Launches(Recorder):
    """Launches of products: (kernel, grid, values)."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, tuple[int, ...], list[int]]] = []

    def _launched(self, launch: Launch) -> int:
        name, kinds = self._names[launch.function - 1]
        if "gemm" in name:
            self.all.append((name, launch.grid, values_of(launch, kinds)))
        return 0


class Heard:
    """What hears which views of a map are asked for."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, bool]] = set()

    def on_view(self, side: int, tiles: bool) -> None:
        self.asked.add((side, tiles))


def unordered(n_rows: int, n_offsets: int, symmetric: bool = False) -> KernelMap:
    """A map whose tables are parts of a memory."""
    memory = torch.randint(-1, n_rows, (8 + n_offsets * n_rows,), dtype=torch.int32)
    center = n_offsets // 2 if symmetric else -1
    tables = [
        NeighborTable(Part(memory, 8, (n_offsets, n_rows))),
        None if symmetric else NeighborTable(torch.randint(n_rows, (n_offsets, n_rows)).int()),
    ]
    return KernelMap(
        Rulebook(n_rows, n_rows, n_offsets, memory.device, symmetric=symmetric, center=center, views=tables)
    )


@contextlib.contextmanager
def calls(monkeypatch, chosen):
    """Calls of one layer on a GPU that is not there: what records its launches, and how often Python binds them."""
    helper()
    recorder, bound, own = Launches(), [], GatherProduct._bind
    monkeypatch.setattr(registry, "choose", lambda case, wanted="": masked.BY_RULE)
    monkeypatch.setattr(GatherProduct, "_bind", lambda *args: bound.append(1) or own(*args))
    with anew(), way(chosen), recorder.recording(), torch.no_grad(), pretended_gpu():
        yield recorder, bound


def run(recorder, bound, layer, x, kmap):
    """(launches with "table" for the map's own, which views were asked for, whether Python has bound it, whether the
    helper did the call)."""
    kmap.rulebook.observe(heard := Heard())
    recorder.all.clear(), bound.clear()
    with served() as by_helper:
        convolve_layer(layer, x, layer.weight, kmap, RELU, FORM)
    table = kmap.rulebook._tables[int(kmap.flipped)]
    at = None if table is None else table.nbr.data_ptr()
    launches = [
        (name, grid, ["table" if one == at else one for one in values[OPERANDS:]])
        for name, grid, values in recorder.all
    ]
    return launches, heard.asked, len(bound), by_helper["known_call"]


def layer_of(volume, channels):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(WIDTH, *[volume] * 3, channels))
    return layer


KINDS = ["few offsets", "narrow", "a stem", "trained", "many rows", "backwards"]


@pytest.mark.parametrize("chosen", ["on", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_without_tiles(kind, chosen, monkeypatch):
    """What the rules leave unordered is bound over the table; the rest is Python's."""
    if kind == "many rows":
        for module in (masked, choice):
            monkeypatch.setattr(module, "unordered_rows", lambda product: (0, 0, 0))
    stem, narrow = kind == "a stem", kind in ("a stem", "narrow")
    over_table = kind not in ("trained", "many rows")
    with calls(monkeypatch, chosen) as (recorder, bound):
        layer, x, runs = layer_of(5 if stem else 2, 4 if narrow else WIDTH), None, []
        x = torch.randn(ROWS, layer.weight.shape[-1])
        for _ in range(5):
            kmap = unordered(ROWS, layer.weight[0, ..., 0].numel(), stem)
            kmap.rulebook.trained = kind == "trained"
            runs.append(run(recorder, bound, layer, x, kmap.transposed() if kind == "backwards" else kmap))
    (first, *_), *_ = runs[0]
    assert first[0] == ("narrow_gemm" if narrow else "gather_gemm")
    assert ("table" in first[2]) == over_table
    assert [made for *_, made, _ in runs[2:]] == [0 if over_table and chosen == "on" else 1] * 3
    assert [by_helper for *_, by_helper in runs[2:]] == [int(chosen == "on")] * 3
    for launches, asked, *_ in runs[1:]:
        assert asked == runs[0][1]
        if over_table:  # what has been ordered lies elsewhere every time
            assert launches == runs[0][0]


@pytest.mark.parametrize(("size", "most"), [(2, (1 << 31) // WIDTH), (4, (1 << 31) // 64)], ids=["output", "table"])
def test_what_32_bits_do_not_address(size, most, monkeypatch, tmp_path):
    """One row more is a launch of another kernel, which Python binds. Nobody touches the memory of either."""
    volume = size**3
    table = torch.from_file(str(tmp_path / "holes"), shared=True, size=volume * most, dtype=torch.int32)
    for module in (masked, choice):
        monkeypatch.setattr(module, "unordered_rows", lambda product: (0, most + 1, most + 1))
    with calls(monkeypatch, "on") as (recorder, bound):
        layer, x, by_python = layer_of(size, WIDTH).half(), torch.randn(ROWS, WIDTH).half(), []
        for n_rows in (most - 1, most - 1, most - 1, most, most, most - 1):
            views = [NeighborTable(Part(table, 0, (volume, n_rows))), None]
            book = Rulebook(ROWS, n_rows, volume, x.device, views=views)
            *_, made, _ = run(recorder, bound, layer, x, KernelMap(book))
            by_python.append(made)
    assert by_python[2:] == [0, 1, 1, 0]


def test_weights_that_kernels_read_as_copies(monkeypatch):
    """As TF32 on Hopper does: the address is the copy's."""
    copies = []

    class Copied:
        def rows_of(self, weight):
            copies.append(weight.clone())
            return copies[-1]

    with calls(monkeypatch, "on") as (recorder, bound):
        layer, x = layer_of(2, WIDTH), torch.randn(ROWS, WIDTH)
        for _ in range(3):
            run(recorder, bound, layer, x, unordered(ROWS, 8))
        plan = histories[id(layer)][1].full_plan
        with mock.patch.object(plan._plan.forward, "_copied", Copied()):
            *_, by_helper = run(recorder, bound, layer, x, unordered(ROWS, 8))
    assert by_helper and [values[1] for _, _, values in recorder.all] == [copy.data_ptr() for copy in copies]
