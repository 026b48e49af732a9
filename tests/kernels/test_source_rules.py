"""Rules of the source: who may import whom, one place that knows devices, no fixed warp size."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import sparse_bridge
from tests.door.test_imports import FILES, imports_of, reaches

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
BASE = ("errors.py", "log.py", "settings.py")
KERNELS = sorted((PACKAGE / "kernels").glob("*.py"))
CORE = [path for path in FILES if path.parent.name == "core"]
ADAPTERS = [path for path in FILES if "adapters" in path.relative_to(PACKAGE).parts]
DEVICE_WORDS = (
    "get_device_capability", "get_device_properties", r"torch\.version", r"gfx\d", r"\bsm_\d",
    r"[\"']cuda[\"']",
)  # fmt: skip


def name_of(path):
    return str(path.relative_to(PACKAGE))


def jit_functions(path):
    """The functions of a file that Triton compiles."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        decorators = getattr(node, "decorator_list", ())
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            yield node


def test_the_rules_see_the_kernels():
    assert sum(len(list(jit_functions(path))) for path in KERNELS) > 15


@pytest.mark.parametrize("name", BASE)
def test_the_base_imports_nothing_of_the_package_but_itself(name):
    below = {f"sparse_bridge.{path.removesuffix('.py')}" for path in BASE}
    found = [n for n in imports_of(PACKAGE / name, True) if n.startswith("sparse_bridge")]
    assert all(reaches({n}, *below) for n in found)
    assert not reaches(imports_of(PACKAGE / name, True), "torch", "triton")


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_kernels_stand_on_the_base_alone(path):
    allowed = ("sparse_bridge.errors", "sparse_bridge.log", "sparse_bridge.kernels")
    ours = {n for n in imports_of(path, True) if n.startswith("sparse_bridge")}
    assert ours == set(reaches(ours, *allowed))


@pytest.mark.parametrize("path", ADAPTERS, ids=name_of)
def test_adapters_never_reach_for_kernels(path):
    assert not reaches(imports_of(path, True), "sparse_bridge.kernels")


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_imports_kernels_only_where_it_needs_them(path):
    """At import time only `target`, which needs no Triton: machines without it get this far."""
    reached = reaches(imports_of(path, False), "sparse_bridge.kernels")
    assert reached == reaches(set(reached), "sparse_bridge.kernels.target")


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_one_file_knows_devices(path):
    """No vendor, generation or wave size outside `target`: those are answers of a `Target`."""
    if path.name in ("target.py", "tile_config.py"):
        pytest.skip("this is where such answers live")
    source = path.read_text(encoding="utf-8")
    for word in DEVICE_WORDS:
        assert not re.search(word, source), word


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_no_warp_size_is_written_down(path):
    """Threads are counted as num_warps x target.warp_size; no instruction of one vendor."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(
            node.op, (ast.Mult, ast.FloorDiv, ast.LShift)
        ):
            sides = [ast.unparse(side) for side in (node.left, node.right)]
            if any("warps" in side for side in sides):
                assert not any(side in ("32", "64", "5", "6") for side in sides), ast.unparse(node)
    for function in jit_functions(path):
        body = ast.unparse(function)
        for word in ("inline_asm", "tl.extra", "libdevice", "shfl", "ballot", "warp", "wave_size"):
            assert word not in body.split('"""')[-1], f"{function.name}: {word}"
