"""What is known of the values of expressions, and which names from outside are in them."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from ....refusals import Why
from .origins import words
from .tags import (
    COUNTS,
    HOLDS,
    NONE,
    OLD,
    ROWS,
    SHAPE,
    STATE,
    Name,
    Passed,
    Tag,
    constant,
    container_of,
    element_of,
    is_channel,
    of_axis,
    text_of,
)

# Those that neither tensors nor layers have.
_WRITES = words("append extend insert setdefault popitem appendleft popleft extendleft move_to_end")
_SLOTS = ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__")
_LOOKUPS = words("get setdefault pop index __getitem__ insert")
_PARTS = words(
    "get setdefault pop popitem items values keys copy __getitem__ modules children named_modules named_children "
    "get_submodule parameters buffers"
)
_SAME = words("int float min max sum abs round str tuple list sorted divmod pow hash repr format bool set")
_CONTAINERS = words("iter zip enumerate reversed sorted list tuple dict set map filter frozenset")


class Expressions:
    """Expressions of one function; see `Reading`."""

    def __init__(self, returns: dict[str, Tag], rows: frozenset[int]) -> None:
        self.names: dict[tuple[str, tuple[str, ...]], Name] = {}
        self.attributes: set[str] = set()
        self.any_attribute = False
        self.problems: dict[tuple[str, int], tuple[Why, str, int]] = {}
        self.passed: dict[tuple[str, int | str], Passed] = {}
        self.env: dict[str, Tag] = {}
        self.imports: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._known, self._rows = returns, rows
        self.compared_owner: str | None = None  # see `Compared`
        self._outside: set[str] = set()  # declared global or nonlocal
        self._globals: set[str] = set()  # declared so, and compared
        self._enclosing: set[str] = set()  # bound by functions around it, in the same call

    def problem(self, why: Why, what: str, node: ast.AST) -> None:
        """Keep why the world is open."""
        line = getattr(node, "lineno", 0)
        self.problems.setdefault((why.name, line), (why, what, line))

    def branch(self, test: ast.expr, raises: bool = False) -> None:
        """A condition. raises: it does nothing but end the call with an error."""
        if self.of(test) & COUNTS and not raises:
            self.problem(Why.GRAPH_CHOOSES_BY_ROWS, text_of(test), test)

    def bind(self, target: ast.expr, tags: Tag, value: ast.expr | None) -> None:
        """A value is put there."""
        if isinstance(target, ast.Name):
            if target.id in self._outside or (target.id in self._globals and tags & COUNTS):
                self.problem(Why.GRAPH_WRITES_STATE, target.id, target)
            if target.id in self._globals:
                self._named(target.id, (), target)
            self.env[target.id] = self.env.get(target.id, NONE) | tags
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, tags, value)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, container_of(tags), None)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            base = self.of(target.value)
            if isinstance(target, ast.Subscript):
                tags |= self.of(target.slice)
            if base & OLD and not self._is_compared(target, tags):
                self.problem(Why.GRAPH_WRITES_STATE, text_of(target), target)

    def _is_compared(self, target: ast.expr, tags: Tag) -> bool:
        """Whether `target` is an attribute, or in one, that is compared after the call; what follows from rows
        may be the same by chance."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if tags & COUNTS or not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
            return False
        self.attributes.add(target.attr)
        return target.value.id == self.compared_owner

    def _unpack(self, targets: list[ast.expr], tags: Tag, value: ast.expr | None) -> None:
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(targets):
            for target, own in zip(targets, value.elts, strict=True):
                self.bind(target, self.of(own), own)
            return
        for place, target in enumerate(targets):
            if tags & SHAPE and not isinstance(target, ast.Starred):
                part = ROWS if place == 0 else NONE
            else:
                part = element_of(tags)
            self.bind(target, part, None)

    def of_item(self, node: ast.expr, tags: Tag) -> Tag:
        """Of what a loop over an expression takes. Places that `enumerate` counts are no state, but this errs
        on the side of caution."""
        return element_of(tags)

    # expressions: `of` returns what is known of their values

    def of(self, node: ast.expr) -> Tag:
        """What is known of the value of an expression."""
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is not None:
            return method(node)
        tags = NONE
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                tags |= self.of(child)
        return tags & ROWS

    def _of_Constant(self, node: ast.Constant) -> Tag:
        return NONE

    def _of_Lambda(self, node: ast.Lambda) -> Tag:
        return NONE

    def _of_Name(self, node: ast.Name) -> Tag:
        return self._named(node.id, (), node)

    def _named(self, name: str, chain: tuple[str, ...], node: ast.AST) -> Tag:
        if name in self.imports:
            module, inside = self.imports[name]
            self.names[name, chain] = Name(module, (*inside, *chain), getattr(node, "lineno", 0), True)
            return STATE
        if name in self.env and name not in self._outside and name not in self._globals:
            return self.env[name]
        if name in self._enclosing:
            return HOLDS
        self.names.setdefault((name, chain), Name(name, chain, getattr(node, "lineno", 0)))
        return STATE

    def _of_Attribute(self, node: ast.Attribute) -> Tag:
        self.attributes.add(node.attr)
        chain: list[str] = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            self.attributes.add(inner.attr)
            chain.insert(0, inner.attr)
            inner = inner.value
        base = self._named(inner.id, tuple(chain), node) if isinstance(inner, ast.Name) else self.of(inner)
        if "__dict__" in chain:
            self.any_attribute = True
        if "__class__" in chain:
            return STATE
        if chain[-1] == "shape":
            return NONE if base & OLD else SHAPE
        return STATE if base & STATE else NONE

    def _of_Subscript(self, node: ast.Subscript) -> Tag:
        base, index = self.of(node.value), self.of(node.slice)
        display = isinstance(node.value, (ast.List, ast.Tuple, ast.Dict))
        if index & ROWS and (base & STATE or display) and not isinstance(node.slice, (ast.Slice, ast.Tuple)):
            self.problem(Why.GRAPH_CHOOSES_BY_ROWS, text_of(node), node)
        if isinstance(node.slice, ast.Slice) and not base & SHAPE:
            return container_of(base) | (base & OLD)
        return of_axis(base, node.slice, index)

    def _of_BinOp(self, node: ast.BinOp) -> Tag:
        tags = self.of(node.left) | self.of(node.right)
        return (HOLDS if tags & HOLDS and not tags & OLD else NONE) | (tags & COUNTS)

    def _of_Compare(self, node: ast.Compare) -> Tag:
        parts = [node.left, *node.comparators]
        tags = [self.of(part) for part in parts]
        if all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
            return NONE
        return ROWS if any(tag & COUNTS for tag in tags) else NONE

    def _of_BoolOp(self, node: ast.BoolOp) -> Tag:
        tags = NONE
        for part in node.values:
            tags |= self.of(part)
        return tags

    def _of_IfExp(self, node: ast.IfExp) -> Tag:
        self.branch(node.test)
        return self.of(node.body) | self.of(node.orelse)

    def _of_List(self, node: Any) -> Tag:
        tags = NONE
        for part in node.elts:
            tags |= container_of(self.of(part))
        return tags

    _of_Tuple = _of_Set = _of_List

    def _of_Dict(self, node: ast.Dict) -> Tag:
        tags = NONE
        for key, value in zip(node.keys, node.values, strict=True):
            tags |= (self.of(key) & ROWS if key is not None else NONE) | container_of(self.of(value))
        return tags

    def _of_Starred(self, node: ast.Starred) -> Tag:
        return element_of(self.of(node.value))

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Tag:
        tags = self.of(node.value)
        self.bind(node.target, tags, node.value)
        return tags

    def _of_ListComp(self, node: Any) -> Tag:
        for generator in node.generators:
            tags = self.of(generator.iter)
            if tags & ROWS:
                self.problem(Why.GRAPH_CHOOSES_BY_ROWS, text_of(generator.iter), node)
            self.bind(generator.target, self.of_item(generator.iter, tags), None)
            for test in generator.ifs:
                self.branch(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        tags = NONE
        for part in parts:
            tags |= container_of(self.of(part))
        return tags

    _of_SetComp = _of_DictComp = _of_GeneratorExp = _of_ListComp

    def _of_Call(self, node: ast.Call) -> Tag:
        places: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
        places += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
        arguments = [(place, self.of(part)) for place, part in places]
        every = NONE
        for _, tags in arguments:
            every |= tags
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, arguments, every)
        if isinstance(node.func, ast.Name):
            return self._function(node, node.func.id, arguments, every)
        self.of(node.func)
        return NONE

    def _function(self, node: ast.Call, name: str, arguments: list[tuple[int | str, Tag]], every: Tag) -> Tag:
        self.of(node.func)
        first = arguments[0][1] if arguments else NONE
        if not hasattr(builtins, name) or name in self.env:
            return self._own(name, arguments, 0)
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
            attribute = constant(node.args[1])
            if isinstance(attribute, str):
                self.attributes.add(attribute)
            else:
                self.any_attribute = True
            if name in ("setattr", "delattr") and first & OLD:
                self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
            if name == "getattr" and attribute == "shape":
                return NONE if first & OLD else SHAPE
            return element_of(first) & STATE
        if name in ("vars", "dir"):
            self.any_attribute = True
            return first & STATE
        if name == "next" and first & OLD:
            self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
        if name == "len":
            tensor = node.lineno in self._rows and not first & OLD
            return ROWS if tensor or first & ROWS else NONE
        if name == "super" or (name == "type" and len(node.args) == 1):
            return STATE
        tags = every & COUNTS if name in _SAME or name in ("range", *_CONTAINERS) else NONE
        if name == "range":
            return ROWS if tags else NONE
        if name in ("list", "tuple", "reversed", "sorted") and first & SHAPE:
            tags = SHAPE if name in ("list", "tuple") else ROWS
        if name in _CONTAINERS:
            tags |= HOLDS if every & STATE else NONE
        return tags

    def _own(self, name: str, arguments: list[tuple[int | str, Tag]], shift: int) -> Tag:
        """A function that may be the program's."""
        for place, tags in arguments:
            if tags:
                key = place + shift if isinstance(place, int) else place
                known = self.passed.get((name, key))
                self.passed[name, key] = Passed(name, key, tags | (known.tags if known else NONE))
        return self._known.get(name, NONE)

    def _method(self, node: ast.Call, method: ast.Attribute, arguments: list[tuple[int | str, Tag]], every: Tag) -> Tag:
        name = method.attr
        base = self._owner(method)
        if name == "size":
            if not node.args and not node.keywords:
                return NONE if base & OLD else SHAPE
            axis = node.args[0] if node.args else node.keywords[0].value
            return NONE if base & OLD or is_channel(axis) else ROWS
        if name in ("numel", "nelement") or name == "__len__":
            return NONE if base & OLD else ROWS
        if name in _WRITES and base & OLD and not self._is_compared(method.value, every):
            self.problem(Why.GRAPH_WRITES_STATE, text_of(method.value), node)
        if name in _LOOKUPS and base & STATE and every & ROWS:
            self.problem(Why.GRAPH_CHOOSES_BY_ROWS, text_of(node), node)
        if name in _SLOTS and arguments and (arguments[0][1] | base) & OLD:
            self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
        result = self._own(name, arguments, 1)
        if name in _PARTS and base & STATE:
            result |= STATE if name != "copy" else HOLDS
        return result

    def _owner(self, method: ast.Attribute) -> Tag:
        """Of the object whose method is called. `cfg.get(...)` asks for `cfg.get`, not for all of `cfg`."""
        names = dict(self.names)
        owner = self.of(method.value)
        if isinstance(method.value, (ast.Name, ast.Attribute)):
            self.names = names
            self.of(method)
        self.attributes.add(method.attr)
        return owner
