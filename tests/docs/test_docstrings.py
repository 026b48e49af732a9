"""Public names of `core` and `kernels` say what they are: by a docstring, or by that of the method they override."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import sparse_bridge

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
FOLDERS = ("core", "kernels")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """What a body defines, also below `if` and `try`, but for further signatures of the same name."""
    for node in body:
        if isinstance(node, Definition):
            if not {"overload", "setter", "deleter"} & {ast.unparse(d).split(".")[-1] for d in node.decorator_list}:
                yield node
        elif isinstance(node, ast.If | ast.Try):
            for part in (node.body, *[h.body for h in getattr(node, "handlers", ())], node.orelse):
                yield from definitions(part)


class Sources:
    """Modules by name, and their classes with bases by full names. A package ends in `.__init__`."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        self.classes: dict[str, tuple[ast.ClassDef, list[str]]] = {}
        for name, tree in self.trees.items():
            meanings = imported(name, tree)
            for node in definitions(tree.body):
                if isinstance(node, ast.ClassDef):
                    bases = [full_name(ast.unparse(base), name, meanings) for base in node.bases]
                    self.classes[full_name(node.name, name, {})] = node, bases

    def undocumented(self) -> list[str]:
        """Public functions, classes and methods without a word."""
        return [
            f"{module}.{name}"
            for module, tree in self.trees.items()
            for node in definitions(tree.body)
            for name in self._silent(module, node)
        ]

    def _silent(self, module: str, node: Definition) -> Iterator[str]:
        if node.name.startswith("_"):
            return
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            owner = full_name(node.name, module, {})
            for method in definitions(node.body):
                if not method.name.startswith("_") and not self._says(owner, method.name):
                    yield f"{node.name}.{method.name}"

    def _says(self, owner: str, method: str) -> bool:
        """Whether a class or one that it derives from documents a method."""
        if owner not in self.classes:
            return False
        node, bases = self.classes[owner]
        own = [one for one in definitions(node.body) if one.name == method]
        return any(ast.get_docstring(one) for one in own) or any(self._says(base, method) for base in bases)


def imported(module: str, tree: ast.Module) -> dict[str, str]:
    """Names that relative imports bring into a module: their full names."""
    meanings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = [*module.split(".")[: -node.level], *filter(None, [node.module])]
            meanings |= {alias.asname or alias.name: ".".join([*source, alias.name]) for alias in node.names}
    return meanings


def full_name(name: str, module: str, meanings: dict[str, str]) -> str:
    first, _, rest = name.partition(".")
    found = meanings.get(first) or f"{module.removesuffix('.__init__')}.{first}"
    return f"{found}.{rest}" if rest else found


def sources() -> Sources:
    paths = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    return Sources({name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)})


def test_every_public_name_says_what_it_is():
    assert sources().undocumented() == []


BASE = '''
class Job:
    """A job."""

    def fill(self):
        """Write the result."""

    def block(self): ...
'''


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("def f(): pass", ["f"]),
        ('def f():\n    """Words."""', []),
        ("def _f(): pass\nclass _C:\n    def f(self): pass", []),
        ("@triton.jit\ndef place_at(p): return p", ["place_at"]),
        ("if True:\n    def f(): pass\nelse:\n    class C: pass", ["f", "C"]),
        ('class C:\n    """Words."""\n    def f(self): pass\n    def _g(self): pass', ["C.f"]),
        ('from .base import Job\nclass C(Job):\n    """Words."""\n    def fill(self): pass', []),
        ('from . import base\nclass C(base.Job):\n    """Words."""\n    def fill(self): pass', []),
        ('from .base import Job\nclass C(Job):\n    """Words."""\n    def block(self): pass', ["C.block"]),
        ('from .other import Job\nclass C(Job):\n    """Words."""\n    def fill(self): pass', ["C.fill"]),
        (
            "from .base import Job\nclass C(Job):\n    def fill(self): pass\nclass D(C):\n    def fill(self): pass",
            ["C", "D"],
        ),
    ],
)
def test_the_rule_sees(text, silent):
    made = Sources({"a.base": BASE, "a.it": text})
    assert made.undocumented() == ["a.base.Job.block", *[f"a.it.{name}" for name in silent]]


def test_packages_are_read_too():
    made = Sources(
        {
            "a.__init__": BASE,
            "a.b.__init__": 'from .. import Job\nclass C(Job):\n    """W."""\n    def fill(self): pass',
        }
    )
    assert made.undocumented() == ["a.__init__.Job.block"]
