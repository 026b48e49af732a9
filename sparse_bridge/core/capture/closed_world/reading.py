"""What a function of a program reads and writes that may have been there before the call."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from ....refusals import Why
from .expressions import Expressions
from .sources import Source
from .tags import NONE, OLD, ROWS, STATE, Compared, Parameters, Tag, element_of, only_raises, text_of


class Reading(Expressions):
    """One function, with what is known of its parameters. names: from outside.  attributes: names of attributes
    that it reads.  any_attribute: it also reads others.  problems: (reason, what, line).  calls: functions by name."""

    def __init__(
        self,
        source: Source,
        parameters: Parameters,
        returns: dict[str, Tag],
        rows: frozenset[int] = frozenset(),
        inner: bool = False,
        compared: Compared = Compared.NOTHING,
    ) -> None:
        """returns: of functions of the program, by name.  rows: lines that ask for the length of a tensor.
        inner: the function around it ran in the call as well."""
        super().__init__(returns, rows)
        first = [*source.node.args.posonlyargs, *source.node.args.args][:1]
        self.compared, self.compared_owner = compared, first[0].arg if first and compared is Compared.OWNER else None
        self.result, self.has_defaults = NONE, False
        if inner:
            for node in source.outer:
                self._enclosing |= _bound(node)
        self._bind_parameters(source, parameters)
        node = source.node
        for _ in range(3):  # what a loop binds at its end is read at its beginning
            before = dict(self.env)
            if isinstance(node, ast.Lambda):
                self.result |= self.of(node.body)
            else:
                for statement in node.body:
                    self.visit(statement)
            if self.env == before:
                break

    def _bind_parameters(self, source: Source, parameters: Parameters) -> None:
        arguments = source.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        for place, one in enumerate(positional):
            self.env[one.arg] = parameters.get(place, NONE) | parameters.get(one.arg, NONE)
        for one in (*arguments.kwonlyargs, *[a for a in (arguments.vararg, arguments.kwarg) if a is not None]):
            self.env[one.arg] = parameters.get(one.arg, NONE)
        pairs: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(reversed(positional), reversed(arguments.defaults), strict=False)
        ]
        pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        for one, default in pairs:
            if default is not None and not isinstance(default, ast.Constant):
                self.env[one.arg] |= STATE
                self.has_defaults = True

    def visit(self, node: ast.AST) -> None:
        """Read a statement and what is in it."""
        method = getattr(self, f"_do_{type(node).__name__}", None)
        if method is not None:
            method(node)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.of(child)
            elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
                self.visit(child)

    def _do_FunctionDef(self, node: Any) -> None:
        self.env[node.name] = NONE

    _do_AsyncFunctionDef = _do_ClassDef = _do_FunctionDef

    def _do_Global(self, node: Any) -> None:
        (self._outside if self.compared is Compared.NOTHING else self._globals).update(node.names)

    def _do_Nonlocal(self, node: Any) -> None:
        self._outside |= set(node.names) - self._enclosing

    def _do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.imports[name] = (alias.name if alias.asname else name, ())

    def _do_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            self.imports[name] = ("." * node.level + (node.module or ""), (alias.name,))

    def _do_Assign(self, node: ast.Assign) -> None:
        tags = self.of(node.value)
        for target in node.targets:
            self.bind(target, tags, node.value)

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.of(node.value), node.value)

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        tags = self.of(node.value)
        if isinstance(node.target, ast.Name) and node.target.id not in self._outside:
            own = self.env.get(node.target.id, NONE)
            if own & OLD and isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp)):
                self.problem(Why.GRAPH_WRITES_STATE, node.target.id, node)
            self.env[node.target.id] = own | tags
        else:
            self.bind(node.target, tags, None)

    def _do_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name) or target.id in self._outside:
                self.bind(target, NONE, None)

    def _do_For(self, node: Any) -> None:
        tags = self.of(node.iter)
        if tags & ROWS:
            self.problem(Why.GRAPH_CHOOSES_BY_ROWS, text_of(node.iter), node)
        self.bind(node.target, self.of_item(node.iter, tags), None)
        self._all(node.body, node.orelse)

    _do_AsyncFor = _do_For

    def _do_If(self, node: ast.If) -> None:
        self.branch(node.test, only_raises(node))
        self._all(node.body, node.orelse)

    def _do_While(self, node: ast.While) -> None:
        self.branch(node.test)
        self._all(node.body, node.orelse)

    def _do_Assert(self, node: ast.Assert) -> None:
        self.branch(node.test, True)

    def _do_Match(self, node: Any) -> None:
        self.branch(node.subject)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None)
                if isinstance(name, str):
                    self.env[name] = element_of(self.of(node.subject))
                elif isinstance(part, ast.expr):
                    self.of(part)
            if case.guard is not None:
                self.branch(case.guard)
            self._all(case.body)

    def _do_With(self, node: Any) -> None:
        for item in node.items:
            tags = self.of(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, tags, None)
        self._all(node.body)

    _do_AsyncWith = _do_With

    def _do_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.of(node.type)
        if node.name:
            self.env[node.name] = NONE
        self._all(node.body)

    def _do_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.result |= self.of(node.value)

    def _do_Expr(self, node: ast.Expr) -> None:
        self.of(node.value)

    def _do_Raise(self, node: ast.Raise) -> None:
        """What an error says is no matter: none was raised."""

    def _all(self, *blocks: Iterable[ast.stmt]) -> None:
        for block in blocks:
            for statement in block:
                self.visit(statement)


def _bound(node: Any) -> set[str]:
    """The names that a function binds."""
    arguments = node.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            names.add(part.name)
    return names
