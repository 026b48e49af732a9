"""What is written down of a network, and what is refused by name and line."""

from __future__ import annotations

import ctypes
import pathlib
import re
import struct
import threading
import time

import pytest
import torch

import sparse_bridge
from sparse_bridge import export, settings
from sparse_bridge.core.warmup import preload
from sparse_bridge.errors import UnsupportedError
from sparse_bridge.export import ExportError, load_package
from sparse_bridge.export.player import package_file, stand_in
from sparse_bridge.export.player.entry import entry_of
from sparse_bridge.export.player.library import PlayerError
from sparse_bridge.export.player.record import record, target_of
from sparse_bridge.kernels.runtime import target as targets
from tests.adapters.spconv import apis

from . import networks, zoo

TARGETS = [f"cuda:{number}" for number in (75, 80, 86, 87, 89, 90, 100, 120)]
TARGETS += [f"hip:{name}" for name in ("gfx90a", "gfx942", "gfx1100", "gfx1201")]


@pytest.fixture
def sp():
    with apis.standin() as module:
        yield module


class Layers(torch.nn.Module):
    """A layer, and what a function makes of its features."""

    def __init__(self, sp, behind):
        super().__init__()
        self.sp, self.behind = sp, behind
        self.layer = sp.SubMConv3d(4, 16, 3, indice_key="a")

    def forward(self, features, coords):
        x = self.layer(self.sp.SparseConvTensor(features, coords, [8, 8, 8], 2))
        return self.behind(x)


def recorded(sp, behind, target="cuda:87", rows=64):
    return record(Layers(sp, behind).eval(), networks.scene((8, 8, 8), 50), rows, target)


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (lambda x: x.features.mean(0), r"calls aten\.mean\.dim of float32 \[64, 16\]"),
        (lambda x: x.features.softmax(1), r"calls aten\._softmax\.default"),
        (lambda x: x.features - x.features[0], r"takes rows of \[64, 16\] by their numbers \(select\)"),
        (lambda x: x.features[:10], r"takes rows of \[64, 16\] by their numbers \(slice\)"),
        (lambda x: x.features.view(-1), r"takes rows of \[64, 16\] by their numbers \(view\)"),
        (lambda x: torch.cat([x.features, x.features]), r"calls aten\.cat\.default"),
        (lambda x: x.features[x.features[:, 0] > 0], r"calls aten\.gt\.Scalar"),
        (lambda x: torch.sort(x.features[:, 0])[0], r"calls aten\.sort"),
        (lambda x: x.indices.sigmoid(), r"calls aten\.sigmoid\.default of int32"),
    ],
)
def test_what_no_kernel_computes_is_named_with_its_line(sp, behind, words):
    line = behind.__code__.co_firstlineno
    with pytest.raises(ExportError, match=words) as refused:
        recorded(sp, behind)
    where = re.search(r"the model \(Layers\), (\S+):(\d+),", str(refused.value))
    assert where is not None, refused.value
    assert pathlib.Path(where[1]).name == "test_record.py" and int(where[2]) == line


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (lambda x: x.features / len(x.features), "computes with other numbers over other rows .* of 25 and of 50"),
        (lambda x: x.features * len(x.features), "computes with other numbers"),
        (lambda x: x.features / torch.tensor(float(len(x.features))), r"other numbers .*tensor of 25\.0 and of 50\.0"),
        (lambda x: x.features * torch.full((16,), float(len(x.features))), "other numbers .*full of"),
        (lambda x: x.features + torch.linspace(0, 1, len(x.features))[:, None], "other numbers .*linspace of"),
        (lambda x: x.features.sum().item(), r"calls aten\.sum"),
        (lambda x: 3, "a package returns tensors"),
        (lambda x: torch.ones(3), "output 0 of the model"),
    ],
)
def test_results_that_depend_on_the_rows_or_are_none(sp, behind, words):
    with pytest.raises((ExportError, TypeError), match=words):
        recorded(sp, behind)


def test_a_model_that_takes_other_ways_over_other_rows(sp):
    class Choosing(Layers):
        def forward(self, features, coords):
            x = self.layer(self.sp.SparseConvTensor(features, coords, [8, 8, 8], 2))
            return self.other(x).features if len(features) > 30 else x.features

    model = Choosing(sp, None)
    model.other = sp.SparseConv3d(16, 16, 2, 2)
    with pytest.raises(ExportError, match="asks for other maps over fewer rows"):
        record(model.eval(), networks.scene((8, 8, 8), 50), 64, "cuda:87")


def test_a_refusal_of_a_layer_has_its_line(sp):
    class Again(Layers):
        def forward(self, features, coords):
            x = self.sp.SparseConvTensor(features, coords, [8, 8, 8], 2)
            self.layer(x)
            other = self.sp.SparseConvTensor(features, coords + 1, [9, 9, 9], 2)
            return self.layer(other).features

    with pytest.raises(ExportError, match=r"layer \(SubMConv3d\), \S+test_record\.py:\d+, asks for a map of other"):
        record(Again(sp, None).eval(), networks.scene((8, 8, 8), 50), 64, "cuda:87")


def test_what_has_to_know_the_rows_has_its_line():
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as ME

        model = torch.nn.Sequential(ME.MinkowskiConvolution(4, 8, 3, dimension=3), ME.MinkowskiInstanceNorm(8))
        features, coords = networks.scene((8, 8, 8), 50)
        with pytest.raises(ExportError, match=r"1 \(MinkowskiInstanceNorm\), \S+, "):
            record(model.eval(), [ME.SparseTensor(features, coords)], 64, "cuda:87")


@pytest.mark.parametrize("case", ["curve", "given"])
def test_rows_of_flex_gemm_in_an_order_of_the_hosts_are_refused(monkeypatch, case):
    """Along a curve, whose codes the host alone computes, or as the caller hands them over."""
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        from flex_gemm.ops import spconv as flex_gemm

        class Down(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(8, 2, 2, 2, 4))

            def forward(self, features, coords):
                out = coords // 2 if case == "given" else None
                shape = torch.Size([2, 4, 8, 8, 8])
                return flex_gemm.sparse_conv3d(features, coords, shape, self.weight, out_coords=out, stride=2)[0]

        if case == "curve":
            monkeypatch.setattr(flex_gemm, "SERIALIZATION_MODE", 1, raising=False)
        with pytest.raises(ExportError, match=r"the model \(Down\), \S+test_record\.py:(\d+), ") as refused:
            record(Down().eval(), networks.scene((8, 8, 8), 50), 64, "cuda:87")
        first = Down.forward.__code__.co_firstlineno
        line = int(re.search(r"test_record\.py:(\d+), ", str(refused.value))[1])
        assert first < line <= first + 3, refused.value


def test_rows_of_several_levels_joined_are_refused_with_their_line(sp):
    """As VoxelNeXt's backbone joins them: how many there are of each level is known on the GPU alone."""

    class Joined(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = sp.SubMConv3d(4, 16, 3)
            self.down = sp.SparseConv3d(16, 16, 3, 2, padding=1)

        def forward(self, features, coords):
            x = self.first(sp.SparseConvTensor(features, coords, [8, 8, 8], 2))
            y = self.down(x)
            places = torch.cat([x.indices, y.indices * torch.tensor([1, 2, 2, 2], dtype=torch.int32)])
            rows = torch.cat([x.features, y.features])
            cells, inverse = torch.unique(places[:, [0, 2, 3]], dim=0, return_inverse=True)
            joined = rows.new_zeros(len(cells), rows.shape[1]).index_add_(0, inverse, rows)
            return joined, cells

    with pytest.raises(ExportError, match=r"the model \(Joined\), \S+test_record\.py:(\d+), ") as refused:
        record(Joined().eval(), networks.scene((8, 8, 8), 50), 64, "cuda:87")
    first = Joined.forward.__code__.co_firstlineno
    line = int(re.search(r"test_record\.py:(\d+), ", str(refused.value))[1])
    assert first + 3 <= line <= first + 6, refused.value


def test_sparse_tensors_that_are_no_input():
    with sparse_bridge.enable("torchsparse", mode="standin"):
        import torchsparse as ts

        features, coords = networks.scene((8, 8, 8), 50)
        layer, x = ts.nn.Conv3d(4, 8, 3).eval(), ts.SparseTensor(features, coords)
        with torch.no_grad():
            seen = layer(x)
        with pytest.raises(ExportError, match="that layers have seen"):
            record(layer, [seen], 64, "cuda:87")
        flat = coords.clone()
        flat[:, 2] = flat[:, 3]
        with pytest.raises(ExportError, match="two columns of the example"):
            record(layer, [ts.SparseTensor(features, flat)], 64, "cuda:87")
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as ME

        coarse = ME.SparseTensor(features, 2 * coords * torch.tensor([0, 1, 1, 1]).int(), tensor_stride=2)
        with pytest.raises(ExportError, match="at stride 1"):
            record(ME.MinkowskiConvolution(4, 8, 3, dimension=3).eval(), [coarse], 64, "cuda:87")


@pytest.mark.parametrize("target", ["cuda:999", "hip:gfx000", "hip:gfx1030", "cuda:70"])  # LLVM ends at the first
def test_targets_that_no_kernel_is_for(target):
    with pytest.raises(ExportError, match=f"target '{target}': no kernel is for such a GPU; .* cuda:87, "):
        target_of(target)


def test_the_examples_features_and_rows(sp):
    features, coords = networks.scene((8, 8, 8), 50)
    model = Layers(sp, lambda x: x.features).eval()
    with pytest.raises(ExportError, match=r"features are torch\.float64; expected torch\.float32"):
        record(model.double(), (features.double(), coords), 64, "cuda:87")
    with pytest.raises(ExportError, match="the example has no rows"):
        record(model.float(), (features[:0], coords[:0]), 64, "cuda:87")


@pytest.mark.parametrize("label", ["the example", "scene 1"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("many", r"rows is 64; expected at least the 65 rows of {}\."),
        ("equal", "2 of 50 rows of {} repeat the coordinates"),
        ("outside", r"3 of 50 rows of {} lie outside of the grid of the model, \[8, 8, 8\] with 2 batch items"),
    ],
)
def test_scenes_that_no_player_takes(sp, tmp_path, label, case, words):
    features, coords = networks.scene((8, 8, 8), 65 if case == "many" else 50)
    if case == "equal":
        coords[7] = coords[9] = coords[1]
    if case == "outside":
        coords[3, 1], coords[4, 0], coords[5, 3] = 8, 2, -1
    good, scenes = networks.scene((8, 8, 8), 40, seed=1), []
    example = (features, coords)
    if label != "the example":
        example, scenes = good, [example]
    with pytest.raises(ExportError, match=words.format(label)):
        export.export_gpu_package(
            Layers(sp, lambda x: x.features).eval(), example, tmp_path, targets=["cuda:87"], rows=64, scenes=scenes
        )


@pytest.mark.parametrize("rows", [1 << 29, 1 << 31, 1 << 70])
def test_rows_for_which_nothing_has_room(sp, tmp_path, rows):
    model, example = Layers(sp, lambda x: x.features).eval(), networks.scene((8, 8, 8), 50)
    with pytest.raises(ExportError, match=f"rows is {rows}; expected at most 357913941"):
        export.export_gpu_package(model, example, tmp_path, targets=["cuda:87"], rows=rows)


def test_a_host_without_memory(sp, tmp_path, monkeypatch):
    def refuse(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr("sparse_bridge.export.player.record.pad_input", refuse)
    model, example = Layers(sp, lambda x: x.features).eval(), networks.scene((8, 8, 8), 50)
    with pytest.raises(ExportError, match="no memory to record 64 rows; package with fewer"):
        export.export_gpu_package(model, example, tmp_path, targets=["cuda:87"], rows=64)


def test_what_a_model_raises_is_handed_on(sp):
    def fails(x):
        raise RuntimeError("an error of the model's.")

    with pytest.raises(ExportError, match=r"test_record\.py:\d+, raised RuntimeError: an error of the model's\. While"):
        recorded(sp, fails)


def test_a_forced_dataflow_is_refused(sp):
    with settings.override(dataflow="per_offset"), pytest.raises(ExportError, match="per_offset is forced"):
        recorded(sp, lambda x: x.features)


def test_without_triton_it_is_said_where_to_go(monkeypatch):
    for version, advice in ((None, "pip install triton"), ((3, 4, 0), r"here is 3\.4\.0.* pip install -U triton")):
        monkeypatch.setattr(targets, "triton_version", lambda version=version: version)
        with pytest.raises(UnsupportedError, match=advice):
            _ = export.export_gpu_package


def test_a_module_inside_is_named(sp):
    class Head(torch.nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    class Whole(Layers):
        def __init__(self):
            super().__init__(sp, lambda x: self.heads["box"](x.features))
            self.heads = torch.nn.ModuleDict({"box": Head()})

    with pytest.raises(ExportError, match=r"heads\.box \(Head\), \S+test_record\.py:\d+, calls aten\.cumsum"):
        record(Whole().eval(), networks.scene((8, 8, 8), 50), 64, "cuda:87")


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.zeros(5, 4),),
        (torch.zeros(5, 4), torch.zeros(5, 4)),
        (torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.int64)),
        (torch.zeros(5, 4), torch.zeros(6, 4, dtype=torch.int32)),
    ],
    ids=["one", "floats", "int64", "rows"],
)
def test_inputs_are_features_and_coordinates(sp, inputs):
    with pytest.raises(ExportError, match="a GPU package takes features"):
        record(Layers(sp, lambda x: x.features).eval(), inputs, 64, "cuda:87")


@pytest.mark.parametrize("name", ["cuda", "cuda:", "cuda:sm_87", "gfx942", "hip:942", "xpu:1", "", "hip:"])
def test_names_of_targets(name):
    with pytest.raises(Exception, match="expected"):
        target_of(name)


def test_sums_products_and_joined_channels_are_recorded(sp):
    scale, shift = torch.linspace(0.5, 2, 16), torch.tensor(0.25)

    def behind(x):
        y = (x.features * scale + shift).relu() - 0.5
        y = y + torch.ones_like(y)
        return torch.cat([y, x.features[:, 4:8], (y * y).half().float()], 1), x.indices

    program = recorded(sp, behind)
    assert [output.shape for output in program.outputs] == [(64, 36), (64, 4)]
    assert "_elementwise" in {kernel.name for kernel in program.kernels}


NORMS = {
    "in place": (lambda x, norm: torch.relu_(norm(x)), 1),
    "apart": (lambda x, norm: norm(x).relu(), 1),
    "used besides": (lambda x, norm: [y := norm(x), y.relu()], 2),
    "used before": (lambda x, norm: [(y := norm(x)) + 1, y.relu()], 3),
    "changed before": (lambda x, norm: [y := norm(x), x.add_(1), y.relu_()], 3),
    "a part of it": (lambda x, norm: norm(x)[:, :8].relu(), 2),
    "another norm": (lambda x, norm: [y := norm(x), z := norm(y), y.relu_(), z], 3),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_and_its_relu_are_one_step(sp, case):
    """Unless something else needs the norm first; kernels that nobody launches are not in the package."""
    behind, n_steps = NORMS[case]
    norm = networks.ready(torch.nn.BatchNorm1d(16, affine=False))
    program = recorded(sp, lambda x: behind(x.features * 2, norm))
    steps = [step for step in program.steps if step.kind == package_file.LAUNCH]
    names = [program.kernels[step.kernel].name for step in steps]
    assert names.count("_elementwise") == 1 + n_steps, names
    assert {step.kernel for step in steps} == set(range(len(program.kernels)))


def test_what_is_played_is_what_was_recorded(gpu, sp, tmp_path):
    """Launches, in order, with their grids and arguments; a block of memory that all of them lie in."""
    model, grid = networks.encoder(sp)
    program = record(networks.ready(model), networks.scene(grid, 200, seed=1), 300, "cuda:87")
    path = tmp_path / "model.sbp"
    package_file.write(path, [program])
    launches, blocks = [], set()
    sizes = {1: "B", 2: "H", 4: "I", 8: "Q"}

    def launched(it):
        step = steps[len(launches)]
        values = []
        for place, arg in enumerate(step.args):
            (value,) = struct.unpack("<" + sizes[arg.size], ctypes.string_at(it.parameters[place], arg.size))
            if arg.kind == package_file.ADDRESS:
                blocks.add(value - arg.value)
                value = arg.value
            values.append(value)
        launches.append((it.name, it.grid, it.threads, it.shared, values))

    steps = [step for step in program.steps if step.kind == package_file.LAUNCH]
    package = load_package(path, graph=False)
    gpu.listen(launched)
    features, coords = networks.scene(grid, 77)
    with pytest.raises(PlayerError):  # nothing counts the rows
        package(coords, features)
    assert len(blocks) == 1 and len(launches) == len(steps) > 10
    for (name, where, threads, shared, values), step in zip(launches, steps, strict=True):
        kernel = program.kernels[step.kernel]
        assert (name, where, threads, shared) == (kernel.name, step.grid, kernel.threads, kernel.shared)
        assert values == [arg.value for arg in step.args]
    package.close()


@pytest.mark.slow
def test_memory_is_shared_by_what_is_not_needed_together(sp):
    model, grid = networks.unet(sp)
    networks.ready(model)
    few, many = (record(model, networks.scene(grid, 200, seed=1), rows, "hip:gfx1100") for rows in (2000, 4000))
    weights = sum(len(constant.data) for constant in few.constants)
    assert 1.5 < (many.block - weights) / (few.block - weights) < 2.5
    levels = [(level.capacity, other.capacity) for level, other in zip(few.levels, many.levels, strict=True)]
    assert all(one <= other for one, other in levels)


def test_a_program_does_not_depend_on_what_was_recorded_before(sp):
    """Nor on what the same layers have computed on the host."""
    model, grid = networks.encoder(sp)
    networks.ready(model)
    scene = networks.scene(grid, 250, seed=1)
    before = record(model, scene, 2500, "hip:gfx942")
    other = record(model, scene, 2500, "hip:gfx1100")
    with torch.no_grad():
        assert model(*scene)["rows"].isfinite().all()
    again = record(model, scene, 2500, "hip:gfx942")
    assert {kernel.threads for kernel in other.kernels} != {kernel.threads for kernel in before.kernels}
    assert again == before


def test_kernels_of_no_other_driver_are_launched(sp):
    """Triton keeps compiled kernels by a driver's device: one of another driver with the same would run unheard."""
    from triton.runtime import driver

    class Other:
        def launched(self, *launch):
            """Nothing is done."""

    numbers = set()
    for name in ("gfx942", "sm_90"):
        with stand_in.driving(targets.described(name), Other()):
            numbers.add(driver.active.get_current_device())
    assert len(numbers) == 2 and not any(isinstance(number, int) for number in numbers)


def test_coordinates_that_nobody_reads_are_not_computed(sp):
    def behind(x):
        unread = torch.cat([x.indices, 3 * x.indices], 1) + 1
        return x.features, (x.indices + 7).flip(1) if unread.ndim else unread

    steps = [
        [program.kernels[step.kernel].name for step in program.steps if step.kind == package_file.LAUNCH]
        for program in (recorded(sp, behind), recorded(sp, lambda x: x.features))
    ]
    assert steps[0] == [*steps[1], *["_elementwise"] * 5]  # a sum, and columns one by one


def test_torchsparse_rounds_products_as_on_a_gpu():
    """To TF32, unless its switch says otherwise; scenes are compared accordingly."""
    with sparse_bridge.enable("torchsparse", mode="standin"):
        import torchsparse as ts

        x = ts.SparseTensor(*networks.scene((8, 8, 8), 100))
        model = torch.nn.Sequential(ts.nn.Conv3d(4, 32, 3), ts.nn.Conv3d(32, 32, 3)).eval()
        rounded = record(model, [x], 200, "cuda:87")
        assert entry_of(model, [x]).tf32
        ts.backends.allow_tf32 = False
        try:
            assert not entry_of(model, [x]).tf32
            exact = record(model, [x], 200, "cuda:87")
        finally:
            ts.backends.init()
        old = record(model, [x], 200, "cuda:75")  # which has no TF32
    assert {kernel.code for kernel in exact.kernels} != {kernel.code for kernel in rounded.kernels}
    assert old.kernels


def test_a_driver_that_is_being_made_does_not_take_over(sp, monkeypatch):
    """Where there is a GPU, Triton's driver for it is made in the background while the program goes on."""
    from triton.runtime import driver

    def prepare():
        time.sleep(0.5)
        driver.set_active(None)

    monkeypatch.setattr(preload, "_thread", threading.Thread(target=prepare))
    preload._thread.start()
    model, grid = networks.encoder(sp)
    scene = networks.scene(grid, 100, seed=1)
    steps = record(networks.ready(model), scene, 200, "cuda:86").steps  # takes longer than that
    assert steps == record(model, scene, 200, "cuda:86").steps


def test_what_fails_while_it_is_learnt_is_named():
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as ME

        first = ME.MinkowskiConvolution(4, 8, 2, 2, dimension=3)
        model = torch.nn.Sequential(first, ME.MinkowskiPoolingTranspose(2, 2, dimension=3)).eval()
        with pytest.raises(ExportError, match=r"1 \(MinkowskiPoolingTranspose\), .* values mean nothing on the host"):
            record(model, [ME.SparseTensor(*networks.scene((8, 8, 8), 100))], 200, "cuda:86")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles(target, name):
    with zoo.network(name) as own:
        program = record(own.model, own.inputs(*networks.scene(own.grid, 250, seed=1)), 6000, target)
    assert program.target == target and all(kernel.code[:4] == b"\x7fELF" for kernel in program.kernels)
