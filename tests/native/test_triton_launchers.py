"""Which of Triton's compiled kernels the helper launches, and how it reads what they take."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("triton")

from sparse_bridge.kernels.runtime import native_launch, triton_compat
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.launch import OPTIONS, REGISTRY
from sparse_bridge.tools.offline_compile import catalogue, compiling
from tests.conftest import INTERPRETED
from tests.fake_driver import Driver
from tests.native.recording import helper, values_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled here")
RELEASE = triton_compat.VERSION
direct = pytest.mark.skipif(RELEASE < (3, 3), reason="the helper starts with Triton 3.3")
ARCHES = {"sm_90": "CudaLauncher", "gfx942": "HIPLauncher"}
_LETTERS = {"fp32": "f", "fp64": "d", "i32": "i", "i64": "l", "i1": "b", "i8": "b", "i16": "h"}


def plainest(arch):
    """A form of each kernel, and of each kind of it."""
    for spaces in catalogue.spaces(targets.described(arch)).values():
        for space in spaces:
            for place in (0, -1) if all(space.factors.values()) else ():
                yield space.build(**{name: some[place] for name, some in space.factors.items()})


def expected(form):
    """The letters of a form, from the types that it names and the kernel's own arguments."""
    kernel = REGISTRY[form.kernel]
    names = kernel.fn.arg_names
    letters = []
    for place, name in enumerate(names):
        kind = form.types[place] if place < len(form.types) else "constexpr"
        if name in kernel.constants or name in form.ones or kind == "constexpr":
            letters.append("x")
        else:
            letters.append("P" if kind.startswith("*") else _LETTERS[kind])
    return "".join(letters)


def read_as_declared(arch, forms):
    target, seen = targets.described(arch), set()
    for form in forms:
        kinds = native_launch.letters_of(compiling.source(form, target).signature)
        assert kinds == expected(form), form.kernel
        assert len(kinds) <= 64 and helper().Launcher(1, 0, 32, 0, kinds)
        seen |= {form.kernel, *kinds}
    assert seen >= set("Pxilf") and len(seen) > 5 + len(catalogue.spaces(target)) // 2


@pytest.mark.parametrize("arch", ARCHES)
def test_kinds_of_every_kernel(arch):
    read_as_declared(arch, plainest(arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_kinds_of_every_form(arch):
    read_as_declared(arch, catalogue.covering(targets.described(arch)))


def compiled(arch, **metadata):
    """A kernel that Triton has compiled for a GPU that is not there, and its launcher."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = targets.described(arch)
    form = min(plainest(arch), key=lambda form: len(form.types))
    chip = target.capability if target.backend == "cuda" else target.arch
    gpu = GPUTarget(target.backend, chip, target.warp_size)
    options = {**OPTIONS, **dict(form.options)}
    made = triton.compile(compiling.source(form, target), target=gpu, options=options)
    run = type(ARCHES[arch], (), {"profile_scratch_size": 0, "global_scratch_size": 0})()
    return form, types.SimpleNamespace(
        src=made.src, metadata=made.metadata, function=4321, packed_metadata=None, run=run
    )


@direct
@pytest.mark.parametrize("arch", ARCHES)
def test_a_compiled_kernel_is_launched_directly(arch, monkeypatch):
    seen = []
    form, made = compiled(arch)
    kinds = native_launch.letters_of(made.src.signature)
    driver = Driver(lambda launch: seen.append((launch, values_of(launch, kinds))))
    asked = []

    def driver_of(launcher):
        asked.append(launcher)
        return driver.address, None

    monkeypatch.setattr(native_launch, "driver_of", driver_of)
    call, before, between = triton_compat.launcher_of(made)
    assert type(call) is helper().Launcher and before == between == ()
    assert asked == [ARCHES[arch]] and kinds == expected(form)
    values = [16 * place for place in range(len(kinds))]
    call(3, 2, 1, 5, *values)
    launch, found = seen[0]
    warps = made.metadata.num_warps
    assert launch[:5] == (4321, (3, 2, 1), warps * targets.described(arch).warp_size, made.metadata.shared, 5)
    assert found == [value for value, kind in zip(values, kinds, strict=True) if kind != "x"]


class CudaLauncher:
    gsan_enabled = False


class HIPLauncher:
    pass


class XPULauncher:
    pass


def described(**changed):
    """A compiled kernel of one value, as Triton describes it."""
    fields = {
        "num_warps": 4,
        "warp_size": 32,
        "shared": 228 << 10,
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    signature = changed.pop("signature", {"x_ptr": "*fp16", "N": "i32", "BLOCK": "constexpr"})
    metadata = types.SimpleNamespace(**{**fields, **changed})
    return types.SimpleNamespace(metadata=metadata, function=1, src=types.SimpleNamespace(signature=signature))


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(native_launch, "driver_of", lambda launcher: (1, None))
    helper()


def made(run=None, **changed):
    run = CudaLauncher() if run is None else run
    return native_launch.native_launcher(described(**changed), run)


def test_what_is_launched_directly(driver):
    kind = helper().Launcher
    assert type(made()) is kind
    assert type(made(HIPLauncher(), warp_size=64)) is kind
    assert type(made(signature={})) is kind


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"shared": (228 << 10) + 1},
        {"signature": {"x": "*fp16", "scale": "fp16"}},
        {"signature": {"x": "nvTmaDesc"}},
        {"signature": {"x": ("*fp16", "i32")}},
        {"signature": {"x": "tensordesc<fp16[64, 64]>"}},
        {"signature": {"x": None}},
        {"run": XPULauncher()},
        {"run": lambda *args: None},
    ],
    # Of a launcher its class: an address would be another one in every process.
    ids=lambda changed: " ".join(
        type(value).__name__ if key == "run" else f"{key} {value}" for key, value in changed.items()
    ),
)
def test_what_triton_launches(driver, changed):
    assert made(**changed) is None


@pytest.mark.parametrize("constants", [False, True])
def test_launchers_that_take_no_constants(driver, monkeypatch, constants):
    """Up to Triton 3.2."""
    monkeypatch.setattr(triton_compat, "PASS_CONSTEXPRS", constants)
    compiled = described()
    compiled.run, compiled.packed_metadata = CudaLauncher(), ()
    assert (type(triton_compat.launcher_of(compiled)[0]) is helper().Launcher) == constants


def test_a_gpu_that_looks_after_memory(driver):
    run = CudaLauncher()
    run.gsan_enabled = True
    assert made(run) is None


def test_without_a_driver_or_a_helper(driver, monkeypatch):
    from sparse_bridge import native, settings

    with settings.override(native=False):
        assert made() is None
    monkeypatch.setattr(native_launch, "driver_of", lambda launcher: None)
    assert made() is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "module", lambda: None)
    assert made() is None


def test_the_drivers_function(monkeypatch):
    # Any library that this process has loaded stands for the driver's.
    monkeypatch.setattr(
        native_launch,
        "_DRIVERS",
        {
            "CudaLauncher": ("usleep", "libc.so"),
            "HIPLauncher": ("no_such_function", "libc.so"),
            "Third": ("usleep", "libno_such_library.so"),
        },
    )
    native_launch.driver_of.cache_clear()
    try:
        address, enter = native_launch.driver_of("CudaLauncher")
        assert address > 0 and callable(enter)
        assert native_launch.driver_of("HIPLauncher") is None
        assert native_launch.driver_of("Third") is None
        launch = helper().Launcher(address, 1, 32, 0, "")
        assert launch(1, 1, 1, 0) is None
    finally:
        native_launch.driver_of.cache_clear()
