"""The player in C, over pretended drivers: what it launches, and what it refuses, in words."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import struct
import subprocess
import sys
import threading
from ctypes.util import find_library

import pytest
import torch

from sparse_bridge import folders
from sparse_bridge.errors import UnsupportedError
from sparse_bridge.export import ExportError, load_package
from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.library import SOURCES, PlayerError, ProgramInfo, call, library, targets_of

from .networks import CODE, tiny

ARGUMENT, FILE, FORMAT, VERSION, NO_DRIVER, NO_TARGET, MEMORY, DRIVER, ROWS, COORDINATES, OVERFLOW = range(1, 12)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.sbp"
    package_file.write(path, [tiny("cuda:80"), tiny("cuda:87"), tiny("hip:gfx942")])
    return path


def answering(gpu, rows, inserted=None, live=None, overflow=-1, new=8):
    """Have the second launch leave these counters, as kernels would."""
    place = {}

    def launched(it):
        if it.name == "first":
            place["at"] = ctypes.c_uint64.from_address(it.parameters[0]).value - 512
        else:
            counters = [(rows if n is None else n) - 1 for n in (inserted, live)]
            ctypes.memmove(place["at"], struct.pack("<8i", *counters, overflow, -1, -1, -1, -1, new - 1), 32)

    gpu.listen(launched)
    return place


def inputs(rows=5):
    return torch.arange(4 * rows, dtype=torch.int32).view(rows, 4), torch.arange(4.0 * rows).view(rows, 4)


@pytest.mark.parametrize("name", ["gcc", "clang"])
@pytest.mark.parametrize("source", ["sparse_bridge_rt.c", "example.c"])
def test_it_is_c99_without_a_warning(tmp_path, name, source):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    words = [name, "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-c", str(SOURCES / source)]
    subprocess.run([*words, "-o", str(tmp_path / "object.o")], check=True)


def test_the_player_is_short():
    assert len((SOURCES / "sparse_bridge_rt.c").read_text().splitlines()) <= 2000


@pytest.mark.parametrize("gpu", ["cuda", "hip"], indirect=True)
def test_a_run_is_the_steps_of_its_program(gpu, path, request):
    backend = request.node.callspec.params["gpu"]
    if backend == "hip":
        package_file.write(path, [tiny("hip:gfx942")])
    launches, copies = [], []
    package = load_package(path, graph=False)

    def launched(it):
        first = ctypes.c_uint64.from_address(it.parameters[0]).value
        values = [ctypes.c_uint32.from_address(it.parameters[1]).value] if it.name == "first" else []
        values += [ctypes.c_uint64.from_address(it.parameters[2]).value] if it.name == "first" else []
        launches.append((it.name, it.grid, it.threads, it.shared, first, *values))

    gpu.listen(launched, lambda *it: copies.append(it))
    coords, features = inputs()
    with pytest.raises(PlayerError):  # counters that no kernel has written
        package(coords, features)
    base = launches[0][4] - 512
    assert launches == [
        ("first", (3, 2, 1), 128, 0, base + 512, 7, 1 << 40),
        ("second", (1, 1, 1), 64, 1 << 16, base + 2048),
    ]
    kinds = [(kind, to - base, size) for kind, to, _, size, _ in copies if 0 <= to - base < 4096]
    sent = [(3, 256, 4), (0, 512, 80), (0, 768, 80)]
    assert kinds == [*sent, (3, 0, 64), (2, 1024, 100)]
    package.close()


@pytest.mark.parametrize("gpu", ["cuda", "hip"], indirect=True)
def test_a_graph_is_the_same_steps(gpu, path, request):
    if request.node.callspec.params["gpu"] == "hip":
        package_file.write(path, [tiny("hip:gfx942")])
    results = []
    for graph in (False, True):
        package = load_package(path, graph=graph)
        for rows in (16, 3):
            place, seen = answering(gpu, rows, new=rows), []
            own = gpu.listening

            def launched(it, own=own, seen=seen):
                seen.append((it.name, it.grid, it.threads, it.shared))
                own(it)

            gpu.listen(launched)
            outputs = package(*inputs(rows))
            results.append((graph, rows, seen, [output.tolist() for output in outputs], place is not None))
        call("capture", package._instance)  # again, or now
        package.close()
    assert [one[1:] for one in results[:2]] == [one[1:] for one in results[2:]]
    assert [name for name, *_ in results[0][2]] == ["first", "second"]


def order_of_a_graph(gpu, path):
    """Launches by their names, and copies within the memory of a package, as a graph of it runs them."""
    package, order = load_package(path, graph=True), []
    answering(gpu, 5)
    own = gpu.listening

    def launched(it):
        order.append(it.name)
        own(it)

    gpu.listen(launched, lambda kind, *_: order.append("copy") if kind == 2 else None)
    package(*inputs())
    package.close()
    return order


@pytest.mark.parametrize("gpu", ["cuda", "hip"], indirect=True)
def test_steps_of_a_graph_wait_for_what_they_have_to(gpu, tmp_path, request):
    """The pretended driver takes the last of all steps that need not wait any longer."""
    program = tiny({"cuda": "cuda:87", "hip": "hip:gfx942"}[request.node.callspec.params["gpu"]])
    path = tmp_path / "model.sbp"
    package_file.write(path, [program])
    assert order_of_a_graph(gpu, path) == ["first", "second", "copy"]
    for edges in ((), ((0, 1), (1, 2), (2, 3))):
        package_file.write(path, [dataclasses.replace(program, edges=edges)])
        assert order_of_a_graph(gpu, path) == ["first", "copy", "second"]


@pytest.mark.slow
def test_drivers_that_cannot_order_a_graph(path, tmp_path):
    """Those of before CUDA 11.3: steps run one behind another. In a process of its own, which has no other driver."""
    code = (
        "import pathlib\n"
        "from tests.player.fake_gpu import FakeGpu\n"
        "from tests.player.test_calls import order_of_a_graph\n"
        f"gpu = FakeGpu('cuda', pathlib.Path({str(tmp_path)!r}), '-DOLD_DRIVER')\n"
        f"print(order_of_a_graph(gpu, {str(path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['first', 'copy', 'second']", done.stderr


@pytest.mark.parametrize(
    "name", ["begin_capture", "launch", "fill", "copy", "wait_for", "get_captured", "end_capture", "make_graph"]
)
def test_a_graph_that_cannot_be_captured(gpu, path, name):
    package = load_package(path, graph=False)
    gpu.fail(name, 0, 900)
    with pytest.raises(PlayerError, match="pretended failure") as refused:
        call("capture", package._instance)
    assert refused.value.code == DRIVER
    gpu.fail("")
    answering(gpu, 5)
    assert package(*inputs())  # step by step
    call("capture", package._instance)
    answering(gpu, 5)
    assert package(*inputs())
    gpu.fail("launch_graph", 0, 900)
    with pytest.raises(PlayerError, match="failed to launch the graph"):
        package(*inputs())
    gpu.fail("")
    package.close()


def test_weights_and_addresses_are_there_beforehand(gpu, path):
    package = load_package(path)
    place = answering(gpu, 5)
    coords, features = inputs()
    grid, rows = package(coords, features)
    content = ctypes.string_at(place["at"] + 3072, 272)
    assert content[:8] == b"weights!"
    assert struct.unpack("<2Q", content[256:]) == (place["at"] + 512, place["at"] + 1024)
    assert grid.shape == (1, 2, 3) and rows.shape == (8, 3)
    # The copy moved the coordinates there.
    assert torch.equal(grid.flatten().view(torch.int32), coords.flatten()[:6])
    package.close()


def test_fewer_rows_than_before_and_none(gpu, path):
    package = load_package(path)
    for rows in (16, 3, 0):
        answering(gpu, rows, new=rows)
        coords, features = inputs(rows)
        assert package(coords, features)[1].shape == (rows, 3)
    package.close()


def test_tensors_on_the_device_are_copied_there(gpu, path):
    package = load_package(path)
    answering(gpu, 5)
    coords, features = inputs()
    copies = []
    gpu.listen(None, lambda *it: copies.append(it[:1]))
    with pytest.raises(PlayerError):
        call("run", package._instance, 1, coords.data_ptr(), features.data_ptr(), 5)
    assert copies.count((2,)) == 3  # both inputs, and the step
    package.close()


def test_counters_come_in_two_copies(gpu, path):
    """Those of the input, and those of all levels, in whatever order they lie."""
    levels = (package_file.Level(2, 40, 96), package_file.Level(3, 40, 16))
    package_file.write(path, [dataclasses.replace(tiny(), levels=levels)])
    package, copies = load_package(path), []
    for new, rows in (((30, 7), 30), ((40, 41), None)):
        place, own = answering(gpu, 5, new=new[1]), gpu.listening

        def launched(it, own=own, new=new, place=place):
            own(it)
            if it.name == "second":
                ctypes.memmove(place["at"] + 96, struct.pack("<4i", -1, -1, -1, new[0] - 1), 16)

        gpu.listen(launched, lambda *it: copies.append((it[0], it[3])))
        if rows:
            assert package(*inputs())[1].shape == (rows, 3)
            # To the host: counters, then both outputs.
            assert [size for kind, size in copies if kind == 1] == [16, 96, 24, 12 * rows]
        else:
            with pytest.raises(PlayerError, match=r"Level 3 .* has more rows \(41\)"):
                package(*inputs())
    package.close()


def test_inputs_that_cannot_be_served(gpu, path):
    package = load_package(path)
    coords, features = inputs()
    for facts, code, words in [
        ({"live": 3}, COORDINATES, "2 of 5 rows have coordinates outside of the grid"),
        ({"inserted": 4}, COORDINATES, "1 of 5 rows repeat the coordinates"),
        ({"overflow": 1}, COORDINATES, "cannot be searched"),
        ({"new": 41}, OVERFLOW, r"Level 2 .* has more rows \(41\) than .* \(40\)"),
    ]:
        answering(gpu, 5, **facts)
        with pytest.raises(PlayerError, match=words) as refused:
            package(coords, features)
        assert refused.value.code == code
        with pytest.raises(PlayerError, match="no result"):
            call("read", package._instance, 0, features.data_ptr(), 24)
    answering(gpu, 5)
    assert package(coords, features)
    with pytest.raises(PlayerError, match="17 rows; this instance takes 0 to 16") as refused:
        package(*inputs(17))
    assert refused.value.code == ROWS
    with pytest.raises(ExportError, match=r"expected torch.int32 \[N, 4\]"):
        package(coords.long(), features)
    package.close()


def test_the_memory_that_a_package_states(gpu, path):
    """Of the program that is played, the same number as the command prints."""
    large = tiny("cuda:87")
    kernels = (large.kernels[0], large.kernels[1]._replace(code=CODE + bytes(3 << 20)), large.kernels[1])
    programs = [tiny("cuda:80"), dataclasses.replace(large, kernels=kernels, block=3 << 20), tiny("hip:gfx942")]
    package_file.write(path, programs)
    assert targets_of(path) == {program.target: program.memory for program in programs}
    package = load_package(path)
    assert package.memory == programs[1].memory == 10 << 20 != programs[0].memory  # 4 and 4, and 2 beside
    package.close()


def test_calls_with_nothing(gpu, path):
    package, info = load_package(path), ProgramInfo()
    player = library()
    model, out = ctypes.c_void_p(), ctypes.c_void_p()
    for name, args in [
        ("load_file", (None, ctypes.byref(model))),
        ("load_file", (b"x", None)),
        ("load_memory", (None, 5, ctypes.byref(model))),
        ("info", (None, 0, ctypes.byref(info))),
        ("info", (package._model, 3, ctypes.byref(info))),
        ("info", (package._model, -1, ctypes.byref(info))),
        ("create", (None, 0, None, 0, ctypes.byref(out))),
        ("create", (package._model, 0, None, 0, None)),
        ("create", (package._model, 1, None, 0, ctypes.byref(out))),
        ("create", (package._model, -1, None, 0, ctypes.byref(out))),
        ("capture", (None,)),
        ("playing", (None, ctypes.byref(info))),
        ("playing", (package._instance, None)),
        ("run", (None, 0, None, None, 0)),
        ("run", (package._instance, 0, None, None, 1)),
        ("run", (package._instance, 2, None, None, 0)),
        ("run", (package._instance, 0, None, None, -1)),
        ("output", (None, 0, None)),
        ("output", (package._instance, 0, None)),
        ("input", (package._instance, 2, None)),
        ("read", (package._instance, 0, None, 0)),
        ("read", (None, 0, None, 0)),
    ]:
        with pytest.raises(PlayerError, match=r".+\.$") as refused:
            call(name, *args)
        assert refused.value.code in (ARGUMENT, ROWS), name
    assert player.sbrt_run(None, 0, None, None, 0, None) == ARGUMENT  # an error may be left out
    assert player.sbrt_count(None) == 0
    player.sbrt_unload(None)
    player.sbrt_destroy(None)
    package.close()


def test_files_that_are_none(path, tmp_path):
    content = path.read_bytes()
    for name, changed, code, words in [
        ("short", content[:50], FORMAT, "no package"),
        ("empty", b"", FORMAT, "no package"),
        ("cut", content[:-5], FORMAT, "was written with"),
        ("longer", content + b"x", FORMAT, "was written with"),
        ("changed", content[:-1] + bytes([content[-1] ^ 1]), FORMAT, "checksum"),
        ("version", content[:8] + b"\x03" + content[9:], VERSION, "version 3"),
        ("magic", b"\x89SBQ" + content[4:], FORMAT, "no package"),
    ]:
        other = tmp_path / name
        other.write_bytes(changed)
        with pytest.raises(PlayerError, match=words) as refused:
            targets_of(other)
        assert refused.value.code == code, name
    for other in (tmp_path / "missing", tmp_path):
        with pytest.raises(PlayerError, match="cannot be") as refused:
            targets_of(other)
        assert refused.value.code in (FILE, MEMORY)


def test_the_program_is_that_of_the_gpu(gpu, drivers, path):
    assert list(targets_of(path)) == ["cuda:80", "cuda:87", "hip:gfx942"]
    gpu.device(capability=90)
    drivers["hip"].device(arch="gfx90a")
    with pytest.raises(PlayerError, match="only for cuda:80, cuda:87, hip:gfx942") as refused:
        load_package(path)
    assert refused.value.code == NO_TARGET
    drivers["hip"].device(arch="gfx942")
    load_package(path).close()  # an AMD GPU beside it
    assert drivers["hip"].alive == 0


@pytest.mark.slow
def test_a_driver_that_is_missing_is_not_the_reason(tmp_path):
    """Where the GPU of the other driver has no code in the package, or that driver says what is wrong."""
    if any(find_library(name) for name in ("cuda", "amdhip64")):
        pytest.skip("there is a driver")
    path = tmp_path / "model.sbp"
    package_file.write(path, [tiny("cuda:87"), tiny("hip:gfx942")])
    for backend in ("cuda", "hip"):
        (tmp_path / backend).mkdir()
        for setting, said, code in (
            ("gpu.device(capability=90, arch='gfx90a')", "only for cuda:87, hip:gfx942", NO_TARGET),
            ("gpu.device(count=0)", "GPU number 0; there are 0", ARGUMENT),
        ):
            text = (
                "import pathlib, sys\n"
                "from sparse_bridge.export import load_package\n"
                "from tests.player.fake_gpu import FakeGpu\n"
                f"gpu = FakeGpu({backend!r}, pathlib.Path({str(tmp_path / backend)!r}))\n"
                f"{setting}\n"
                "try:\n"
                f"    load_package({str(path)!r})\n"
                "except Exception as error:\n"
                "    print(error.code, error)\n"
            )
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
            assert done.stdout.startswith(f"{code} ") and said in done.stdout, done.stdout


@pytest.mark.parametrize("case", ["no folder", "no compiler"])
def test_the_player_cannot_be_built(path, tmp_path, monkeypatch, case):
    (tmp_path / "file").touch()
    monkeypatch.setattr(folders, "cache", lambda: tmp_path / ("file" if case == "no folder" else "cache"))
    if case == "no compiler":
        monkeypatch.setattr("sparse_bridge.export.player.library.compiler", lambda: [str(tmp_path / "missing")])
    with pytest.raises(UnsupportedError, match=r"cannot be built in .*: .*Set CC .* and SPARSE_BRIDGE_CACHE_DIR"):
        library.__wrapped__()


def test_an_instance_for_fewer_rows(gpu, path):
    package = load_package(path, rows=4)
    with pytest.raises(PlayerError, match="0 to 4"):
        package(*inputs(5))
    package.close()
    for rows in (17, -1):
        with pytest.raises(PlayerError, match="made for 16"):
            load_package(path, rows=rows)


@pytest.mark.parametrize("gpu", ["cuda", "hip"], indirect=True)
@pytest.mark.parametrize(
    "name",
    ["init", "count", "retain", "enter", "load_module", "get_function", "take", "take_host", "copy", "make_stream"],
)
def test_a_driver_that_fails_while_an_instance_is_made(gpu, path, name, request):
    hip = request.node.callspec.params["gpu"] == "hip"
    if hip:
        package_file.write(path, [tiny("hip:gfx942")])
    if hip and name == "retain":
        pytest.skip("HIP has no contexts to retain")
    for after in range(3):
        gpu.fail(name, after, 2)
        try:
            package = load_package(path)
        except PlayerError as error:
            assert error.code in (MEMORY, NO_TARGET, DRIVER) and str(error).endswith(".")
            gpu.fail("")  # the error holds what has been made
        else:
            gpu.fail("")
            package.close()
        assert gpu.alive == 0


@pytest.mark.parametrize("name", ["enter", "copy", "fill", "launch", "wait"])
def test_a_device_that_is_gone(gpu, path, name):
    package = load_package(path)
    for after in range(5):
        answering(gpu, 5)
        gpu.fail(name, after, 700)
        try:
            package(*inputs())
        except PlayerError as error:
            assert error.code == DRIVER and "pretended failure (700)" in str(error)
        else:
            assert after
    gpu.fail("")
    answering(gpu, 5)
    assert package(*inputs())
    package.close()


def test_two_instances_in_two_threads(gpu, path):
    packages, results = [load_package(path) for _ in range(2)], {}
    gpu.listen(None)

    def play(number):
        codes = set()
        for _ in range(200):
            try:
                packages[number](*inputs(number + 3))
            except PlayerError as error:
                codes.add((error.code, str(error)))
        results[number] = codes

    threads = [threading.Thread(target=play, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # No kernel counts, so every row seems to lie outside: of each thread its own number.
    assert results == {
        n: {(COORDINATES, f"{n + 3} of {n + 3} rows have coordinates outside of the grid.")} for n in range(2)
    }
    for package in packages:
        package.close()


def test_numbers_that_lie_are_found(path):
    """With a checksum that is right."""
    program, i32 = tiny(), torch.int32
    step, kernel = program.steps[1], program.kernels[0]
    wrong_arg = step._replace(args=(package_file.Arg(1, 8, 4096), *step.args[1:]))
    lies = {
        "memory": {"block": 0},
        "rows": {"rows": 0},
        "more rows": {"rows": 17},
        "count": {"count_at": 4094},
        "flags": {"flags_at": 4092},
        "step": {"steps": (step._replace(kernel=2),)},
        "grid": {"steps": (step._replace(grid=(0, 1, 1)),)},
        "args": {"steps": (step._replace(args=step.args[:2]),)},
        "address": {"steps": (wrong_arg,)},
        "size": {"steps": (step._replace(args=(step.args[0], package_file.Arg(0, 3, 1), step.args[2])),)},
        "kind": {"steps": (package_file.Step(9),)},
        "fill": {"steps": (package_file.Step(package_file.FILL, to=4000, size=100),)},
        "unaligned": {"steps": (package_file.Step(package_file.FILL, to=2, size=4),)},
        "copy": {"steps": (package_file.Step(package_file.COPY, to=0, start=4000, size=100),)},
        "wraps": {"steps": (package_file.Step(package_file.COPY, to=2**64 - 8, start=0, size=16),)},
        "constant": {"constants": (package_file.Constant(4090, b"weights!"),)},
        "relocation": {"relocations": ((4092, 0),)},
        "leads": {"relocations": ((0, 4096),)},
        "level": {"levels": (package_file.Level(2, 0, 32),)},
        "counters": {"levels": (package_file.Level(2, 40, 4090),)},
        "apart": {"block": 4 << 20, "levels": (*program.levels, package_file.Level(3, 9, 2 << 20))},
        "no level": {"levels": ()},
        "later": {"edges": ((0, 1), (3, 2))},
        "itself": {"edges": ((2, 2),)},
        "no step": {"edges": ((0, 4),)},
        "out of order": {"edges": ((0, 2), (0, 1))},
        "twice": {"edges": ((0, 1), (0, 1))},
        "earlier ones ascend": {"edges": ((0, 3), (1, 3))},
        "threads": {"kernels": (kernel._replace(threads=4096), program.kernels[1])},
        "shared": {"kernels": (kernel._replace(shared=1 << 30), program.kernels[1])},
        "no code": {"kernels": (kernel._replace(code=b""), program.kernels[1])},
        "inputs": {"inputs": program.inputs[:1]},
        "input": {"inputs": (program.inputs[1], program.inputs[0])},
        "outputs": {"outputs": ()},
        "output": {"outputs": (package_file.Tensor("x", i32, -1, (1 << 40, 1 << 40), 0),)},
        "outside": {"outputs": (package_file.Tensor("x", i32, -1, (1000,), 1000),)},
    }
    for name, fields in lies.items():
        content = package_file.content_of([dataclasses.replace(program, **fields)])
        path.write_bytes(content)
        with pytest.raises(PlayerError, match="The package is damaged") as refused:
            targets_of(path)
        assert refused.value.code == FORMAT, name
    package_file.write(path, [program])
    assert list(targets_of(path)) == ["cuda:87"] and CODE in path.read_bytes()


@pytest.mark.parametrize("wrong", [{"device": "0"}, {"device": True}, {"rows": 1.5}, {"rows": 1 << 40}, {"graph": 1}])
def test_what_is_no_number_is_refused(tmp_path, wrong):
    with pytest.raises(ExportError, match=f"load_package: {next(iter(wrong))} is .*; pass"):
        load_package(tmp_path / "model.sbp", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda coords, features: (None, features),
        lambda coords, features: (coords.tolist(), features),
        lambda coords, features: (coords.sum().int(), features.sum()),
        lambda coords, features: (coords.to("meta"), features.to("meta")),
        lambda coords, features: (coords, features.to_sparse()),
        lambda coords, features: (coords[:2], features),
    ],
    ids=["none", "list", "numbers", "meta", "sparse", "rows"],
)
def test_what_is_no_input_is_refused(gpu, tmp_path, wrong):
    package_file.write(tmp_path / "model.sbp", [tiny()])
    package = load_package(tmp_path / "model.sbp")
    with pytest.raises(ExportError, match=r"expected torch\.int32 \[N, 4\] and torch\.float32 \[N, 4\]"):
        package(*wrong(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)))
    package.close()
    with pytest.raises(ExportError, match="the package was closed"):
        package(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4))
