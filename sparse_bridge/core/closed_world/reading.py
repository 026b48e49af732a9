"""What a function of a program reads and writes that may have been there before the call."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from ...refusals import Refusal, Why
from .checks import Checks
from .sources import Source, position, private_names, source_of
from .tags import NONE, OLD, ROWS, STATE, Tag, constant, defaults_of, element_of, text_of

_PASSES = 5  # from function to function
_Known = dict[CodeType, dict[int | str, Tag]]  # of the parameters of functions


class Reading(Checks):
    """One function, with what is known of its parameters. names: from outside.  attributes: names of attributes
    that it reads; optional: those that need not be there.  any_attribute: it also reads others.  problems: (reason,
    what, line).  calls: functions by name."""

    def __init__(
        self,
        source: Source,
        parameters: Mapping[int | str, Tag],
        returns: dict[str, Tag],
        rows: frozenset[int] = frozenset(),
        inner: bool = False,
        compares: bool = False,
        of_module: bool = False,
    ) -> None:
        """returns: of functions of the program, by name.  rows: lines that ask for the length of a tensor.
        inner: the function around it ran in the call as well.  compares: globals are compared after the call, so that
        writing the same again is allowed; of_module: so are the attributes of its first parameter."""
        super().__init__(returns, rows)
        first = [*source.node.args.posonlyargs, *source.node.args.args][:1]
        self.compares, self.compared_owner = compares, first[0].arg if first and of_module else None
        self.result, self.has_defaults = NONE, False
        self.optional: set[str] = set()
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

    def _function(self, node: ast.Call, name: str, arguments: list[tuple[int | str, Tag]], every: Tag) -> Tag:
        if name in ("locals", "vars", "dir") and not arguments and name not in self.env:
            self.problem(Why.GRAPH_SIDE_EFFECT, name, node)  # what it reads cannot be followed
        if name in ("getattr", "hasattr") and len(node.args) > 1 and isinstance(key := constant(node.args[1]), str):
            self.optional.add(key)
        return super()._function(node, name, arguments, every)

    def _bind_parameters(self, source: Source, parameters: Mapping[int | str, Tag]) -> None:
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
        for part in (*node.decorator_list, *defaults_of(node)):
            self.of(part)
        self.env[node.name] = NONE

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *[keyword.value for keyword in node.keywords]):
            self.of(part)
        self.env[node.name] = NONE

    def _do_Global(self, node: Any) -> None:
        (self._globals if self.compares else self._outside).update(node.names)

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
        self.bind(node.target, element_of(tags), None)
        self._all(node.body, node.orelse)

    _do_AsyncFor = _do_For

    def _do_If(self, node: ast.If) -> None:
        if _only_raises(node):
            self.check(node.test, False)
        else:
            self.branch(node.test)
        self._all(node.body, node.orelse)

    def _do_While(self, node: ast.While) -> None:
        self.branch(node.test)
        self._all(node.body, node.orelse)

    def _do_Assert(self, node: ast.Assert) -> None:
        self.check(node.test, True)

    def _do_Match(self, node: Any) -> None:
        self.branch(node.subject)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None)
                if isinstance(part, ast.MatchClass):
                    self.attributes.update(part.kwd_attrs)
                    self.any_attribute = self.any_attribute or bool(part.patterns)
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


def _only_raises(statement: ast.stmt) -> bool:
    """Whether a condition does nothing but end the call with an error."""
    if isinstance(statement, ast.Assert):
        return True
    return (
        isinstance(statement, ast.If) and not statement.orelse and all(isinstance(s, ast.Raise) for s in statement.body)
    )


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


def readings_of(
    ran: Mapping[CodeType, Mapping[int, bool]],
    rows: Iterable[tuple[str, int]],
    after: Mapping[CodeType, int],
    modules: frozenset[int],
) -> dict[CodeType, Reading]:
    """The functions of a program that ran. Raises Refusal where a graph could not repeat what they do.

    ran: with their owners.  rows, after, modules: see `Watch`.
    """
    readings = read(ran, rows, modules)
    for code, reading in readings.items():
        _refuse_problems(code, reading, _first_line(_source(code).node, after.get(code, 0)))
    return readings


def read(
    ran: Mapping[CodeType, Mapping[int, bool]], rows: Iterable[tuple[str, int]], modules: frozenset[int]
) -> dict[CodeType, Reading]:
    """The same, read until what they pass to each other is known, whatever they do. Raises Refusal where there is no
    source."""
    sources = {code: _source(code) for code in ran}
    nodes = {id(source.node) for source in sources.values()}
    parameters = {code: _of_owner(code, owners) for code, owners in ran.items()}
    returns: dict[str, Tag] = {}
    readings: dict[CodeType, Reading] = {}
    for _ in range(_PASSES):
        before = {code: dict(known) for code, known in parameters.items()}, dict(returns)
        for code, source in sources.items():
            inner = bool(source.outer) and id(source.outer[0]) in nodes
            lines = frozenset(line for file, line in rows if file == code.co_filename)
            of_module = bool(ran[code]) and ran[code].keys() <= modules
            readings[code] = Reading(source, parameters[code], returns, lines, inner, True, of_module)
            readings[code].attributes |= private_names(code)
        for code, reading in readings.items():
            returns[code.co_name] = returns.get(code.co_name, NONE) | reading.result
        _pass_on(readings, sources, parameters, ran)
        if before == (parameters, returns):
            break
    return readings


def unseen_reading(code: CodeType) -> Reading:
    """A function that nobody has watched. Raises Refusal."""
    reading = Reading(_source(code), {}, {})
    reading.attributes |= private_names(code)
    _refuse_problems(code, reading)
    return reading


def _source(code: CodeType) -> Source:
    source = source_of(code)
    if source is None:
        raise Refusal(Why.GRAPH_NO_SOURCE, code.co_name, position(code))
    return source


def _of_owner(code: CodeType, owners: Mapping[int, bool]) -> dict[int | str, Tag]:
    made = not owners or all(owners.values()) or code.co_name in ("__init__", "__post_init__", "__new__")
    return {} if made else {0: STATE}


def _pass_on(
    readings: dict[CodeType, Reading],
    sources: dict[CodeType, Source],
    parameters: _Known,
    ran: Mapping[CodeType, Mapping[int, bool]],
) -> None:
    """What arguments are known to be, to functions of that name."""
    by_name: dict[str, list[CodeType]] = collections.defaultdict(list)
    for code, source in sources.items():
        by_name[code.co_name].append(code)
        if code.co_name == "__init__" and source.owner:
            by_name[source.owner].append(code)
    for reading in readings.values():
        for (function, place), tags in reading.passed.items():
            for code in by_name[function]:
                shift = 1 if code.co_name == "__init__" and function != "__init__" else 0
                if isinstance(place, int):
                    place = place + shift - (0 if ran[code] or shift else _is_method_call(reading, function))
                known = parameters[code]
                known[place] = known.get(place, NONE) | tags


def _is_method_call(reading: Reading, function: str) -> int:
    return 1 if any(name == function for _, chain in reading.names for name in chain[-1:]) else 0


def _first_line(node: ast.AST, line: int) -> int:
    """The line at which what is done after `line` of a function begins: that of the loop around it."""
    loops = [part for part in ast.walk(node) if isinstance(part, (ast.For, ast.While))]
    return min([part.lineno for part in loops if part.lineno <= line <= (part.end_lineno or line)], default=line)


def _refuse_problems(code: CodeType, reading: Reading, after: int = 0) -> None:
    for why, what, line in reading.problems.values():
        if line < after:
            continue
        raise Refusal(why, what, position(code, line))
