"""Parameters of the stand-in that reach nothing: never read, or only checked or stored."""

from __future__ import annotations

import ast
import pathlib

from sparse_bridge.adapters import minkowski

HOME = pathlib.Path(minkowski.__file__).parent
_CHECKS = ("checked", "expect_tensors", "member")


def trees(folder=HOME):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}


def _is_check(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in _CHECKS


def _only_refuses(node, name):
    """Whether an `if` does no more than raise, check, or put a default in place of None."""
    for statement in node.body:
        if isinstance(statement, ast.Raise):
            continue
        if isinstance(statement, ast.Expr) and _is_check(statement.value):
            continue
        if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] == [name]:
            continue
        return False
    return not node.orelse


class _Uses(ast.NodeVisitor):
    """Counts the places of a function where a parameter matters. read: attributes that are."""

    def __init__(self, name, read):
        self.name, self.read, self.found = name, read, 0

    def visit_If(self, node):
        if not _only_refuses(node, self.name):
            self.generic_visit(node)

    def visit_Assign(self, node):
        value = node.value
        mine = isinstance(value, ast.Name) and value.id == self.name
        stored = all(
            isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr not in self.read
            for target in node.targets
        )
        if not (stored and (mine or _is_check(value))):
            self.generic_visit(node)

    def visit_Expr(self, node):
        if not _is_check(node.value):
            self.generic_visit(node)

    def visit_Name(self, node):
        self.found += isinstance(node.ctx, ast.Load) and node.id == self.name


def _does_something(function):
    """Whether a function does more than refuse."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return not all(
        isinstance(statement, ast.Raise)
        or (isinstance(statement, ast.Expr) and _is_check(statement.value))
        or (isinstance(statement, ast.If) and _only_refuses(statement, ""))
        for statement in body
    )


def inert(modules, read):
    """{(function, parameter)} of some modules' public functions."""
    found = set()
    for tree in modules:
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or not _does_something(function):
                continue
            given = function.args
            for name in (a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
                uses = _Uses(name, read)
                for statement in function.body:
                    uses.visit(statement)
                if not uses.found and name not in ("self", "cls") and not name.startswith("_"):
                    found.add((function.name, name))
    return found


def attributes_read(modules):
    return {
        node.attr
        for tree in modules
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
