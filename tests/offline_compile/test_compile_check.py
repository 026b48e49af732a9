"""The compile check: a representative part of it for every target, and what it must see."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.errors import DeviceError
from sparse_bridge.kernels.runtime.architectures import compiled
from sparse_bridge.kernels.runtime.target import described, triton_version
from tests.conftest import EMULATED, INTERPRETED

if (triton_version() or (0,)) < (3, 5) or INTERPRETED or EMULATED:
    pytest.skip("compiles with Triton 3.5 or newer, in the plain lane", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparse_bridge.kernels.tiles.tile import TileConfig
from sparse_bridge.tools.offline_compile import checks, compiling, running, selection, summary
from sparse_bridge.tools.offline_compile.catalogue import covering, spaces
from sparse_bridge.tools.offline_compile.compiling import Code, compile_form, source
from sparse_bridge.tools.offline_compile.forms import Form, make
from sparse_bridge.tools.offline_compile.forms_gemm import Case

COMPILED = tuple(compiled())
GOOD = Code("MFMA", "v_mfma_f32_16x16x16_f16", 80, 0, 0, 16384, 64)


def product(target, tile, kernel="gather_gemm", dtype=torch.float16, precision="ieee"):
    """The plainest form of a product with a tile that nobody ships."""
    space = spaces(target)[kernel][0]
    first = {name: levels[0] for name, levels in space.factors.items()}
    return space.build(**{**first, "case": Case(TileConfig(*tile), dtype, precision)})


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPILED)
def test_representative_forms(arch):
    """One product per dtype and a third of the other kernels compile for every target and pass."""
    place = COMPILED.index(arch)
    jobs = running.jobs_for(COMPILED, full=False)
    results = [running.examine(arch, form) for name, form in jobs if name == arch]
    assert [(r.form.kernel, r.problems) for r in results if r.problems] == []
    assert {r.code.warp_size for r in results} == {64 if arch[:4] == "gfx9" else 32}
    products = {checks.product_of(r.form) for r in results} - {None}
    assert {"fp16", "fp32"} <= products and len(results) >= 10
    assert len(results) == len(selection.representative(described(arch), place))


def test_every_kernel_meets_both_wave_sizes():
    """The representative part compiles each kernel for waves of 64 lanes, of 32, and for NVIDIA."""
    groups = {"wave 64": set(), "wave 32": set(), "NVIDIA": set()}
    for arch, form in running.jobs_for(COMPILED, full=False):
        wave = "wave 64" if arch[:4] == "gfx9" else "wave 32"
        groups[wave if arch.startswith("gfx") else "NVIDIA"].add(form.kernel)
    assert groups["wave 64"] == groups["wave 32"] == groups["NVIDIA"]
    assert len(groups["NVIDIA"]) == len(spaces(described("sm_90")))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [6, 14, 15])
def test_wgmma_runs_ahead_behind_every_epilogue(bits):
    """Rounding accumulators for a norm and then for a residual made ptxas run them in turns."""
    space = spaces(described("sm_90"))["gather_gemm"][0]
    first = {name: levels[0] for name, levels in space.factors.items()}
    case = Case(TileConfig(64, 32, 128, 4, 7), torch.float16, "ieee")
    form = space.build(**{**first, "case": case, "epilogue": (bits, 1, True)})
    result = running.examine("sm_90", form)
    assert result.code.matrix == "WGMMA" and not result.code.serialized and not result.problems


def test_a_tile_that_overflows_the_lds():
    """128 x 128 x 256 halves: two operands of 64 KiB."""
    target = described("gfx942")
    form = product(target, (128, 128, 256, 8, 2), kernel="wgrad_gemm")
    found = running.examine("gfx942", form).problems
    assert any(p.startswith("shared memory") and p.endswith("of 65536 bytes") for p in found)


@pytest.mark.slow
def test_a_tile_that_spills():
    """A 128 x 128 fp32 result in two warps: 256 sums a thread."""
    result = running.examine("sm_80", product(described("sm_80"), (128, 128, 32, 2, 2)))
    assert any(p.startswith("spills") and p.endswith("bytes per thread") for p in result.problems)
    result = running.examine("gfx1100", product(described("gfx1100"), (128, 128, 32, 2, 2)))
    assert any(p.startswith("spills") for p in result.problems)


def test_a_block_counted_for_waves_of_64():
    """One key a lane is the rule of `insert_keys`; 4 x 64 written down breaks waves of 32."""
    if triton_version() >= (3, 7):
        pytest.skip("written for the code that Triton 3.6 makes")
    wide, narrow = described("gfx942"), described("gfx1100")
    (space,) = spaces(wide)["insert_keys"]
    good = space.build(align="large")
    assert running.examine("gfx942", good).problems == ()
    assert good.constants == (4 * 64,)
    (found,) = running.examine("gfx1100", good).problems
    assert found.startswith("does not compile")
    (space,) = spaces(narrow)["insert_keys"]
    assert running.examine("gfx1100", space.build(align="large")).problems == ()


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, []),
        ({"matrix": "", "instruction": ""}, ["matrix instructions: none, expected MFMA"]),
        ({"matrix": "WMMA", "instruction": "v_wmma"}, ["matrix instructions: v_wmma, expected"]),
        ({"spilled": 8}, ["spills 8 bytes per thread"]),
        ({"parked": 8}, []),
        ({"shared": 65537}, ["shared memory 65537 of 65536 bytes"]),
        ({"wide_loops": 1}, ["a loop between 64-bit bounds"]),
        ({"serialized": True}, ["wgmma runs one after another"]),
        ({"warp_size": 32}, ["compiled for 32 lanes, the target has 64"]),
        ({"spilled": 8, "shared": 70000}, ["spills", "shared memory"]),
    ],
)
def test_what_is_held_against_code(change, words):
    target = described("gfx942")
    form = product(target, (64, 64, 32, 4, 2))
    found = checks.problems(form, target, dataclasses.replace(GOOD, **change))
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))


@pytest.mark.parametrize(
    "arch, dtype, precision, tile, kinds",
    [
        ("gfx90a", torch.float32, "ieee", (64, 64, 16, 4, 2), ("MFMA",)),
        ("gfx942", torch.float32, "tf32", (64, 64, 16, 4, 2), ("MFMA",)),
        ("gfx1100", torch.bfloat16, "ieee", (64, 64, 16, 4, 2), ("WMMA",)),
        ("gfx1100", torch.float32, "ieee", (64, 64, 16, 4, 2), ()),
        ("sm_75", torch.float16, "ieee", (64, 64, 16, 4, 2), ()),
        ("sm_80", torch.float16, "ieee", (64, 64, 16, 4, 2), ("MMA",)),
        ("sm_80", torch.float32, "ieee", (64, 64, 16, 4, 2), ()),
        ("sm_90", torch.float16, "ieee", (64, 64, 16, 4, 2), ("WGMMA",)),
        ("sm_90", torch.float16, "ieee", (32, 64, 16, 4, 2), ("MMA", "WGMMA")),
        ("sm_90", torch.float32, "tf32", (64, 64, 16, 4, 2), ("MMA", "WGMMA")),
        ("sm_100", torch.bfloat16, "ieee", (64, 64, 16, 4, 2), ("TCGEN05",)),
        ("sm_120", torch.bfloat16, "ieee", (64, 64, 16, 4, 2), ("MMA",)),
    ],
)
def test_which_matrix_instructions_are_expected(arch, dtype, precision, tile, kinds):
    target = described(arch)
    form = product(target, tile, dtype=dtype, precision=precision)
    assert checks.expected_matrix(form, target) == kinds


@pytest.mark.parametrize(
    "arch, registers, spilled, answer",
    [
        ("gfx942", 80, 4, True),
        ("gfx942", 80, 0, False),
        ("sm_90", 255, 4, True),
        ("sm_90", 96, 64, False),
        ("sm_90", 96, 68, True),
        ("sm_90", 255, 0, False),
    ],
)
def test_spills_by_choice(arch, registers, spilled, answer):
    """ptxas may trade a few registers for more warps; a full register file is a failure."""
    code = dataclasses.replace(GOOD, registers=registers, spilled=spilled)
    target = described(arch)
    form = product(target, (64, 64, 32, 4, 2))
    assert (spilled > checks.tolerated(form, target, code)) == answer


def test_spills_that_are_accepted():
    """One tile of one family, by name; its neighbours are held to nothing spilled."""
    code = dataclasses.replace(GOOD, registers=255, spilled=48)
    for arch, tile, most in (
        ("sm_90", (128, 128, 64, 4, 3), 400),
        ("sm_90", (128, 128, 64, 8, 3), 0),
        ("sm_80", (128, 128, 64, 4, 3), 0),
    ):
        target = described(arch)
        form = product(target, tile, kernel="wgrad_gemm")
        assert checks.tolerated(form, target, code) == most


def test_kernels_without_products_expect_none():
    target = described("gfx942")
    form = next(f for f in covering(target) if f.kernel == "pool_forward")
    assert checks.product_of(form) is None and checks.expected_matrix(form, target) == ()


def test_what_is_compiled_is_what_a_launch_compiles():
    """Types, constants and attributes of the argument analysis: of 16 bytes, 1, within 2 GiB."""
    from sparse_bridge.kernels.gemm.wgrad_gemm import sum_shares_kernel

    form = make(
        sum_shares_kernel,
        (True, 32, 32, 128),
        {"num_warps": 4},
        ["dw_ptr", "stride_dv"],
        ["stride_do"],
        partial="fp32",
        dw="fp16",
        starts="i64",
    )
    names = sum_shares_kernel.fn.arg_names
    made = source(form, described("gfx942"))
    assert made.signature["dw_ptr"] == "*fp16" and made.signature["stride_do"] == "constexpr"
    assert made.constants[(names.index("stride_do"),)] == 1
    marks = {names[place]: dict(found) for (place,), found in made.attrs.items()}
    small = {"tt.pointer_range": 32}
    assert marks == {
        "partial_ptr": small,
        "dw_ptr": small | {"tt.divisibility": 16},
        "starts_ptr": small,
        "stride_dv": {"tt.divisibility": 16},
    }
    large = dataclasses.replace(form, large=True)
    marks = source(large, described("gfx942")).attrs
    assert set(marks) == set(source(form, described("sm_80")).attrs)


def test_code_of_a_small_kernel():
    target = described("gfx1201")
    (space,) = spaces(target)["table_masks"]
    code = compile_form(space.build(align="small"), target)
    assert code.matrix == "" and 0 < code.registers < 256
    assert (code.spilled, code.warp_size) == (0, 32)


@triton.jit
def _looping(bound_ptr, out_ptr, BITS: tl.constexpr, CARRIED: tl.constexpr):
    """Loops up to a bound from memory."""
    end = tl.load(bound_ptr)
    if BITS == 32:
        end = end.to(tl.int32)
    found = tl.zeros((32,), CARRIED) - 1
    for step in range(end):
        found += step.to(CARRIED)
    tl.store(out_ptr + tl.arange(0, 32), (found >= 0).to(tl.int32))


@pytest.mark.parametrize(
    "bits, carried, n", [(64, tl.int64, 1), (64, tl.int32, 1), (64, tl.float32, 0), (32, tl.int64, 0)]
)
def test_loops_between_64_bit_bounds(bits, carried, n):
    signature = {"bound_ptr": "*i64", "out_ptr": "*i32", "BITS": "constexpr", "CARRIED": "constexpr"}
    text = ASTSource(_looping, signature, {"BITS": bits, "CARRIED": carried})
    made = triton.compile(text, target=GPUTarget("hip", "gfx942", 64))
    assert compiling.wide_loops(made.asm["ttir"]) == n


@triton.jit
def _products(x_ptr, y_ptr, out_ptr, bound_ptr, BITS: tl.constexpr):
    """A sum of products up to a bound from memory; it carries floats alone."""
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    end = tl.load(bound_ptr)
    if BITS == 32:
        end = end.to(tl.int32)
    acc = tl.zeros((32, 32), tl.float32)
    for first in range(0, end, 32):
        x = tl.load(x_ptr + (first + row) * 32 + column)
        y = tl.load(y_ptr + (first + row) * 32 + column)
        acc = tl.dot(tl.trans(x), y, acc)
    tl.store(out_ptr + row * 32 + column, acc)


@pytest.mark.parametrize("bits, n", [(64, 1), (32, 0)])
def test_the_pipeliner_lets_loops_carry_integers(bits, n):
    """The stage of shared memory, on GPUs that copy into it while they multiply."""
    signature = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32")
    signature |= {"bound_ptr": "*i64", "BITS": "constexpr"}
    marks = {(place,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for place in range(3)}
    made = triton.compile(
        ASTSource(_products, signature, {"BITS": bits}, marks),
        target=GPUTarget("hip", "gfx950", 64),
        options={"num_stages": 3},
    )
    assert compiling.wide_loops(made.asm["ttir"]) == 0
    if "to_local" not in made.asm["ttgir"]:
        pytest.skip("this Triton pipelines through registers")
    assert compiling.wide_loops(made.asm["ttgir"]) == n


def some_results():
    target = described("gfx942")
    form = product(target, (64, 64, 32, 4, 2))
    bad = ("spills 8 bytes per thread",)
    return [
        running.Result("gfx942", form, dataclasses.replace(GOOD, parked=3), (), 0.2),
        running.Result("gfx942", form, dataclasses.replace(GOOD, spilled=8), bad, 0.2),
        running.Result("sm_75", form, None, ("does not compile: E",), 0.1),
    ]


def test_summaries():
    cdna, turing = summary.summaries(some_results())
    assert (cdna.target.arch, cdna.forms, cdna.failed, cdna.parked) == ("gfx942", 2, 1, 1)
    assert cdna.products == {
        "fp16": "MFMA",
        "bf16": "not in this run",
        "fp32": "not in this run",
        "tf32": "not in this run",
        "tf32x3": "-",
    }
    assert turing.products["bf16"] == "per-offset dataflow"
    assert turing.products["tf32"] == "IEEE fp32 instead"
    page = summary.markdown(some_results(), full=False)
    assert "| gfx942 | MI300X, MI325X | cdna3 | 64 | MFMA |" in page and "2 failed" in page
    told = json.loads(json.dumps(summary.as_json(some_results())))
    assert told["failed"] == 2 and told["results"][1]["problems"] == ["spills 8 bytes per thread"]


@pytest.mark.slow
def test_the_command(monkeypatch, capsys, tmp_path):
    """A run of three forms: shown, written, told as JSON; the exit status says whether all pass."""
    few = running.jobs_for(["gfx942"], full=False)[-3:]
    monkeypatch.setattr(running, "jobs_for", lambda archs, full, kernels: few)
    path = tmp_path / "targets.md"
    arguments = ["doctor", "--targets", "gfx942", "--workers", "1"]
    assert command_line.main([*arguments, "--write", str(path)]) == 0
    head, row = (
        [cell.strip() for cell in line.split(mark)[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        for mark, word in (("┃", "target"), ("│", "gfx942"))
        if line.startswith(f"{mark} {word}")
    )
    shown = dict(zip(head, row, strict=True))
    assert (shown["family"], shown["variants"], shown["failed"]) == ("cdna3", "3", "0")
    assert "3 compilations, 0 failed" in path.read_text()
    bad = [("gfx1100", product(described("gfx1100"), (128, 128, 32, 2, 2)))]
    monkeypatch.setattr(running, "jobs_for", lambda archs, full, kernels: bad)
    assert command_line.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert command_line.main(arguments) == 1
    assert "spills" in capsys.readouterr().out


def test_what_is_no_architecture(capsys):
    for name in ("gfx", "sm90", "h200"):
        assert command_line.main(["doctor", "--targets", name]) == 2
        assert name in capsys.readouterr().err
    with pytest.raises(DeviceError, match="no architecture"):
        running.jobs_for([], False)


def test_a_run_of_some_kernels(capsys):
    jobs = running.jobs_for(["sm_75", "gfx942"], True, ["pack_tiles", "table_masks"])
    met = {(arch, form.kernel) for arch, form in jobs}
    assert met == set(itertools.product(("sm_75", "gfx942"), ("pack_tiles", "table_masks")))
    every = running.jobs_for(["sm_75"], True)
    assert [job for job in every if job[1].kernel == "pack_tiles"] == [
        job for job in jobs if job[0] == "sm_75" and job[1].kernel == "pack_tiles"
    ]
    assert command_line.main(["doctor", "--targets", "sm_75", "--kernel", "gather_gem"]) == 2
    assert "no kernel is named gather_gem; expected some of" in capsys.readouterr().err
    quick = {form.kernel for _, form in running.jobs_for(["sm_89"], False)}
    other = min({*spaces(described("sm_89"))} - quick)
    assert command_line.main(["doctor", "--targets", "sm_89", "--kernel", other]) == 2
    assert f"a quick run has no form of {other}" in capsys.readouterr().err


@pytest.mark.slow
def test_processes(rules):
    """Two workers give what one gives, in the order of the jobs."""
    rules.set(running, _FEW=2)
    target = described("gfx942")
    names = ("table_masks", "pack_tiles", "count_index", "link_rows")
    jobs = [("gfx942", spaces(target)[name][0].covering()[0]) for name in names]
    told = []
    results = running.run(jobs, 2, told.append)
    assert [(r.arch, r.form) for r in results] == jobs and len(told) == 4
    assert not any(running.failures(results))


def end_the_process(self):
    os._exit(11)


class Fatal(Form):
    """Its compilation ends the process, as an assertion in LLVM does."""

    tile = property(end_the_process)
    jit = property(end_the_process)


@pytest.mark.slow
def test_a_compiler_that_crashes(rules):
    """It is that form's failure; the others are examined all the same."""
    rules.set(running, _FEW=1)
    form = spaces(described("gfx942"))["table_masks"][0].covering()[0]
    fields = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)}
    results = running.run([("gfx942", form), ("gfx942", Fatal(**fields))], 2)
    assert [r.problems for r in results] == [(), ("the compiler crashed",)]


@pytest.mark.slow
def test_a_form_that_takes_too_long_fails(rules):
    (arch, form), *_ = running.jobs_for(["gfx1100"], full=False)
    quick = running.examine(arch, form)
    assert quick.problems == () and quick.seconds > 0
    rules.set(running, _MOST_SECONDS=quick.seconds / 1000)
    (problem,) = running.examine(arch, form).problems
    assert "s to compile; allowed 0" in problem
    assert summary.as_json([quick])["slowest_seconds"] == round(quick.seconds, 3)
