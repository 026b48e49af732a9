"""What throws stored winners away: the code of tuned kernels, and nothing else."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from sparse_bridge.core.tuning import kernel_hash as hashing

KERNELS = pathlib.Path(hashing.__file__).parents[2] / "kernels"
GATHER = "gather_kernels.py"


def now():
    return hashing.kernel_hash.__wrapped__()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the kernels' source, which is hashed instead."""
    for name in ("gemm", "tiles"):
        shutil.copytree(KERNELS / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(hashing.resources, "files", lambda package: tmp_path / package.rpartition(".")[2])
    return tmp_path / "gemm"


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def inside(path, function):
    """The first line of code of a jit function, where a line may be added."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"def {function}("))
    return next(line for line in lines[start:] if line.startswith("    pid = tl.") or " = tl." in line)


def test_the_same_source_has_the_same_hash(copy):
    assert now() == hashing.kernel_hash()


def test_words_and_the_hosts_side_keep_the_winners(copy):
    before, path = now(), copy / GATHER
    docstring = path.read_text(encoding="utf-8").split("def _gather_gemm(")[1].split('"""')[1]
    edit(path, docstring, "Other words.")
    line = inside(path, "_gather_gemm")
    edit(path, line, f"\n    # a comment\n{line}  # and another\n")
    edit(path, "gather_gemm_kernel = register(", "_HOST = 7\ngather_gemm_kernel = register(")
    edit(copy / "depthwise.py", "_ROWS = 32", "_ROWS = 64")  # nobody tunes it
    (copy / "notes.txt").write_text("no source")
    assert now() == before


def test_a_function_may_move_to_another_file(copy):
    before, path = now(), copy / "epilogue.py"
    text = path.read_text(encoding="utf-8")
    start = text.index("@triton.jit\ndef _rounded(")
    end = text.index("@triton.jit", start + 1)
    path.write_text(text[:start] + text[end:], encoding="utf-8")
    assert now() != before
    (copy / "activation.py").write_text("import triton\n\n\n" + text[start:end], encoding="utf-8")
    assert now() == before


@pytest.mark.parametrize(
    "file, function",
    [(GATHER, "_gather_gemm"), (GATHER, "_sum_partials"), ("wgrad_gemm.py", "_wgrad_gemm"), ("wgrad_gemm.py", "_pick")],
)
def test_an_edited_kernel_starts_anew(copy, file, function):
    before, path = now(), copy / file
    text = path.read_text(encoding="utf-8")
    head, body = text.split(f"def {function}(")
    path.write_text(f"{head}def {function}(more: tl.constexpr, {body}", encoding="utf-8")
    assert now() != before


def test_the_decorator_counts(copy):
    before = now()
    edit(copy / GATHER, '@triton.jit(do_not_specialize=["n_live_ptr", ', "@triton.jit(do_not_specialize=[")
    assert now() != before


def test_a_constant_that_a_kernel_reads_counts(copy):
    path = copy / GATHER
    line = inside(path, "_gather_gemm")
    edit(path, line, f"    depth = _DEPTH\n{line}")
    edit(path, "gather_gemm_kernel = register(", "_DEPTH = 7\ngather_gemm_kernel = register(")
    before = now()
    edit(path, "_DEPTH = 7", "_DEPTH = 8")
    assert now() != before


def test_without_source_the_version_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing.resources, "files", lambda package: tmp_path)
    empty = now()
    monkeypatch.setattr(hashing, "__version__", "another")
    assert now() not in (empty, hashing.kernel_hash())


def test_bits_of_an_epilogue_count(copy):
    before = now()
    edit(copy.parent / "tiles" / "epilogue_bits.py", "RESIDUAL = 8", "RESIDUAL = 16")
    assert now() != before
