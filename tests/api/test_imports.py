"""What importing costs, and who may import whom."""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Set

import pytest

import sparse_bridge
from tests.each import each_of, tree_of

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
ADAPTERS = ("spconv", "torchsparse", "minkowski")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "standin" not in path.relative_to(PACKAGE).parts)


@pytest.mark.parametrize(
    "code",
    [
        "import sparse_bridge",
        "import sparse_bridge as sb; sb.enable; sb.adapters.base; sb.core; dir(sb)",
        "import sparse_bridge.__main__ as m; m.make_parser(None)",
    ],
)
def test_importing_brings_no_framework_no_triton_and_no_torch(code):
    heavy = ("torch", "triton", "spconv", "cumm", "torchsparse", "MinkowskiEngine", "numpy", "rich")
    check = f"import sys; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert found.stdout.strip() == "[]"


def test_public_names_exist():
    for name in set(sparse_bridge.__all__) - {"convert"}:
        assert getattr(sparse_bridge, name) is not None
        assert name in dir(sparse_bridge)
    there = {*sparse_bridge.__all__, "compile", "export", "profiling"}
    assert dir(sparse_bridge) == sorted(there), "what helps somebody who types"
    assert sparse_bridge.adapters.base.ADAPTERS
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = sparse_bridge.nonesuch


@pytest.mark.parametrize(("typed", "meant"), [("enble", "enable"), ("Optimize", "optimize"), ("reports", "report")])
def test_a_name_that_is_misspelt(typed, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{typed}'. Did you mean: '{meant}'"):
        getattr(sparse_bridge, typed)
    for other in ("nonesuch", "__wrapped__", "_enable"):
        with pytest.raises(AttributeError) as refused:
            getattr(sparse_bridge, other)
        assert "mean" not in str(refused.value)


def test_what_the_readme_types_is_there_after_the_import():
    code = (
        "import sparse_bridge\n"
        "assert callable(sparse_bridge.core.functional.conv)\n"
        "assert not hasattr(sparse_bridge.core, 'nonesuch')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


@functools.cache
def imports_of(path: pathlib.Path, everywhere: bool) -> frozenset[str]:
    """Absolute names that a file imports; only while it is being imported unless `everywhere`:
    then also in functions and for type checkers."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    package = module.removesuffix(".__init__") if path.stem == "__init__" else module.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not everywhere:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not everywhere:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) + 1 - node.level]
            origin = ".".join([*(parent if node.level else []), *filter(None, [node.module])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree_of(path))
    return frozenset(found)


def reaches(names: Set[str], *targets: str) -> list[str]:
    return [n for n in names for t in targets if n == t or n.startswith(t + ".")]


@each_of(FILES, lambda path: str(path.relative_to(PACKAGE)))
def test_layer_rules(path):
    parts = path.relative_to(PACKAGE).parts
    everywhere, at_import = imports_of(path, True), imports_of(path, False)
    if parts[0] == "kernels":
        above = [f"sparse_bridge.{layer}" for layer in ("core", "adapters", "settings")]
        assert not reaches(everywhere, *above)
    else:
        assert not reaches(at_import, "triton"), "only kernels import Triton at the top"
    if parts[0] == "core":
        assert not reaches(everywhere, "sparse_bridge.adapters")
    if parts[0] == "adapters" and path.stem != "convert":
        own = parts[1]
        others = [f"sparse_bridge.adapters.{other}" for other in ADAPTERS if other != own]
        assert not reaches(everywhere, *others), "adapters meet in adapters.convert only"


def test_the_rules_see_relative_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "sparse_bridge")
    path = tmp_path / "sparse_bridge" / "core" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from ..adapters import base\nfrom . import y\ndef f():\n    import triton.language\n"
        "if TYPE_CHECKING:\n    from .. import tools\n"
    )
    assert imports_of(path, False) == {"sparse_bridge.adapters.base", "sparse_bridge.core.y"}
    assert imports_of(path, True) >= {"triton.language", "sparse_bridge.tools"}
