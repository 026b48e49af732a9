"""What the stored winners of tuning depend on: the code of the kernels that are tuned.

The hash covers the jit functions of the tuned kernels, the functions that they call and the
constants that they read, as code: comments, docstrings, formatting, the host's side and the file in
which a function stands do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from importlib import resources

from ..._version import __version__

# Products, and the sums of their partial results.
TUNED = ("_gather_gemm", "_sum_partials", "_wgrad_gemm", "_sum_shares")


@functools.cache
def kernel_hash() -> str:
    """Hash of the tuned kernels; of the version where their source is not there."""
    code, names = _code_of("gemm", "tiles")
    reached, waiting = set[str](), [name for name in TUNED if name in code]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [other for other in names[name] if other in code]
    return _hash(code, reached)


@functools.cache
def code_hash() -> str:
    """Hash of all that decides between dataflows: every kernel of products and of maps."""
    code = _code_of("gemm", "maps")[0]
    return _hash(code, set(code))


def _hash(sources: dict[str, list[str]], names: set[str]) -> str:
    code = "\n".join(text for name in sorted(names) for text in sorted(sources[name]))
    return hashlib.sha256((code or __version__).encode()).hexdigest()[:16]


def _code_of(*rooms: str) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """The code of jit functions and constants by name, and the names that each reads."""
    code: dict[str, list[str]] = {}
    names: dict[str, set[str]] = {}
    for room in rooms:
        for path in resources.files(f"sparse_bridge.kernels.{room}").iterdir():
            if path.name.endswith(".py"):
                _collect(ast.parse(path.read_bytes()), code, names)
    return code, names


def _collect(module: ast.Module, code: dict[str, list[str]], names: dict[str, set[str]]) -> None:
    """Add the code of a file's jit functions and constants, and the names that each reads."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and "jit" in map(_last, node.decorator_list):
            name = node.name
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        code.setdefault(name, []).append(ast.unparse(node))
        read = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        names.setdefault(name, set()).update(read - {name})


def _last(decorator: ast.expr) -> str:
    """ "jit" of `triton.jit` and `triton.jit(...)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
