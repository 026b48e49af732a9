"""What is known of the values of expressions, and which names from outside are in them."""

from __future__ import annotations

import ast
import builtins
from typing import Any, NamedTuple

from ...refusals import Why
from .tags import (
    COUNTS,
    HOLDS,
    NONE,
    OLD,
    ROWS,
    SHAPE,
    STATE,
    Tag,
    asks_for_attributes,
    constant,
    container_of,
    defaults_of,
    element_of,
    is_channel,
    joined,
    makes_iterator,
    of_axis,
    operands,
    text_of,
)


class Name(NamedTuple):
    """A name from outside of a function, and the attributes that are read one after the other."""

    root: str
    chain: tuple[str, ...]
    line: int
    imported: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Those that neither tensors nor layers have.
_WRITES = _words("append extend insert setdefault popitem appendleft popleft extendleft move_to_end")
_SLOTS = ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__")
_LOOKUPS = _words("get setdefault pop index __getitem__ insert")
_PARTS = _words(
    "get setdefault pop popitem items values keys copy __getitem__ modules children named_modules named_children "
    "get_submodule parameters buffers"
)
_NAMED = ("getattr", "hasattr", "setattr", "delattr")
# What reads attributes by names that are not in sight.
_REFLECTS = {*_NAMED, *_words("vars dir attrgetter asdict astuple __dict__ __getattribute__ __getattr__")}
_IN_STEPS = (ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)
_SAME = _words("int float min max sum abs round str tuple list sorted divmod pow hash repr format bool set")
_CHOICE = Why.GRAPH_CHOOSES_BY_ROWS
_STEPS = _words("bool round divmod ceil floor trunc clip minimum maximum sign isqrt")
_NUMBERS = _STEPS | _words("min max log log2 log10 log1p sqrt cbrt exp pow fabs gcd")
_CONTAINERS = _words("iter zip enumerate reversed sorted list tuple dict set map filter frozenset")


class Expressions:
    """Expressions of one function; see `Reading`."""

    def __init__(self, returns: dict[str, Tag], rows: frozenset[int]) -> None:
        self.names: dict[tuple[str, tuple[str, ...]], Name] = {}
        self.attributes: set[str] = set()
        self.any_attribute = False
        self.problems: dict[tuple[str, int], tuple[Why, str, int]] = {}
        self.passed: dict[tuple[str, int | str], Tag] = {}  # arguments, by function and position or name
        self.env: dict[str, Tag] = {}
        self.imports: dict[str, tuple[str, tuple[str, ...]]] = {}
        # Names and attributes that stand for what is not called there: others may call it, unseen.
        self.handed: set[tuple[str, tuple[str, ...]]] = set()
        self._known, self._rows = returns, rows
        self.compared_owner: str | None = None  # a module whose attributes are compared after the call
        self._outside: set[str] = set()  # declared global or nonlocal
        self._globals: set[str] = set()  # declared so, and compared
        self._enclosing: set[str] = set()  # bound by functions around it, in the same call

    def problem(self, why: Why, what: str, node: ast.AST) -> None:
        """Keep why the world is open."""
        line = getattr(node, "lineno", 0)
        self.problems.setdefault((why.name, line), (why, what, line))

    def branch(self, test: ast.expr) -> None:
        """A condition."""
        if self.of(test) & COUNTS:
            self._chosen(test)

    def _chosen(self, node: ast.expr) -> None:
        """What an expression is follows from rows in steps: a trial over other rows may be on the same one."""
        self.problem(_CHOICE, text_of(node), node)

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
            if isinstance(target, ast.Attribute):
                self.attributes.add(target.attr)  # a value that is written anew with each call holds no guard
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
            sizes = tags & SHAPE and not isinstance(target, ast.Starred)
            self.bind(target, (NONE if place else ROWS) if sizes else element_of(tags), None)

    def of(self, node: ast.expr) -> Tag:
        """What is known of the value of an expression."""
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is not None:
            known: Tag = method(node)
            return known
        return joined(self.of(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)) & ROWS

    def _of_Constant(self, node: ast.expr) -> Tag:
        return NONE

    def _of_Lambda(self, node: ast.Lambda) -> Tag:
        for part in defaults_of(node):
            self.of(part)
        return NONE

    def _of_Name(self, node: ast.Name) -> Tag:
        self.handed.add((node.id, ()))
        self.any_attribute = self.any_attribute or node.id in _REFLECTS
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
        self.any_attribute = self.any_attribute or not _REFLECTS.isdisjoint(chain)
        if isinstance(inner, ast.Name):
            self.handed.add((inner.id, tuple(chain)))
            base = self._named(inner.id, tuple(chain), node)
        else:
            base = self.of(inner)
        if "__class__" in chain:
            return STATE
        if chain[-1] in ("shape", "nbytes"):
            return NONE if base & OLD else SHAPE if chain[-1] == "shape" else ROWS
        return STATE if base & STATE else NONE

    def _of_Subscript(self, node: ast.Subscript) -> Tag:
        base, index = self.of(node.value), self.of(node.slice)
        display = isinstance(node.value, (ast.List, ast.Tuple, ast.Dict))
        if index & ROWS and (base & STATE or display) and not isinstance(node.slice, (ast.Slice, ast.Tuple)):
            self.problem(_CHOICE, text_of(node), node)
        if isinstance(node.slice, ast.Slice) and not base & SHAPE:
            return container_of(base) | (base & OLD)
        return of_axis(base, node.slice, index)

    def _of_BinOp(self, node: ast.BinOp) -> Tag:
        tags = self.of(node.left) | self.of(node.right)
        if tags & ROWS and isinstance(node.op, _IN_STEPS):
            self._chosen(node)
        return (HOLDS if tags & HOLDS and not tags & OLD else NONE) | (tags & COUNTS)

    def _of_Compare(self, node: ast.Compare) -> Tag:
        sides = [(one, self.of(one)) for one in (node.left, *node.comparators)]
        tags = joined(side for _, side in sides)
        compared = not all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops)
        counted = all(isinstance(one, ast.Constant) or side & (COUNTS | STATE) for one, side in sides)
        if compared and tags & ROWS and counted:
            self._chosen(node)
        return ROWS if compared and tags & COUNTS else NONE

    def _of_BoolOp(self, node: ast.BoolOp) -> Tag:
        return joined(map(self.of, node.values))

    def _of_IfExp(self, node: ast.IfExp) -> Tag:
        self.branch(node.test)
        return self.of(node.body) | self.of(node.orelse)

    def _of_List(self, node: Any) -> Tag:
        return joined(container_of(self.of(part)) for part in node.elts)

    _of_Tuple = _of_Set = _of_List

    def _of_Dict(self, node: ast.Dict) -> Tag:
        pairs = zip(node.keys, node.values, strict=True)
        return joined((NONE if k is None else self.of(k) & ROWS) | container_of(self.of(v)) for k, v in pairs)

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
                self.problem(_CHOICE, text_of(generator.iter), node)
            self.bind(generator.target, element_of(tags), None)  # places that `enumerate` counts, too
            for test in generator.ifs:
                self.branch(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return joined(container_of(self.of(part)) for part in parts)

    _of_SetComp = _of_DictComp = _of_GeneratorExp = _of_ListComp

    def _of_Call(self, node: ast.Call) -> Tag:
        places: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
        places += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
        arguments = [(place, self.of(part)) for place, part in places]
        every = joined(tags for _, tags in arguments)
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, arguments, every)
        if isinstance(node.func, ast.Name):
            return self._function(node, node.func.id, arguments, every)
        self.of(node.func)
        return NONE

    def _function(self, node: ast.Call, name: str, arguments: list[tuple[int | str, Tag]], every: Tag) -> Tag:
        self._named(name, (), node.func)
        first = arguments[0][1] if arguments else NONE
        called = name in _NAMED and len(node.args) > 1
        self.any_attribute = self.any_attribute or (name in _REFLECTS and not called)
        if not hasattr(builtins, name) or name in self.env:
            return self._own(name, arguments, 0) | self._of_number(node, name, every)
        if called:
            attribute = constant(node.args[1])
            if isinstance(attribute, str):
                self.attributes.add(attribute)
            else:
                self.any_attribute = True
            if name in ("setattr", "delattr") and first & OLD:
                self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
            if name == "getattr" and not first & OLD and attribute == "shape":
                return SHAPE
            return element_of(first) & STATE
        if name in ("vars", "dir"):
            return first & STATE
        if name == "next" and first & OLD and not makes_iterator(node.args[0]):
            self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
        if name == "len":
            tensor = node.lineno in self._rows and not first & OLD
            return ROWS if tensor or first & ROWS else NONE
        if name == "super" or (name == "type" and len(node.args) == 1):
            return STATE
        # `max` of rows and a limit: a capture sees as many rows as there is memory for, and tells.
        limits = name == "min" and not all(self.of(one) & COUNTS for one in operands(node.args))
        if every & ROWS and (limits or name in _STEPS or (name == "int" and isinstance(node.args[0], ast.BinOp))):
            self._chosen(node)
        tags = every & COUNTS if name in _SAME or name in ("range", *_CONTAINERS) else NONE
        if name == "range":
            return ROWS if tags else NONE
        if first & SHAPE and name in ("list", "tuple", "reversed", "sorted"):
            tags = SHAPE if name in ("list", "tuple") else ROWS
        if name in _CONTAINERS:
            tags |= HOLDS if every & STATE else NONE
        return element_of(first) if name == "next" else tags

    def _own(self, name: str, arguments: list[tuple[int | str, Tag]], shift: int) -> Tag:
        """A function that may be the program's."""
        for place, tags in arguments:
            if tags:
                key = place + shift if isinstance(place, int) else place
                self.passed[name, key] = tags | self.passed.get((name, key), NONE)
        return self._known.get(name, NONE)

    def _of_number(self, node: ast.Call, name: str, every: Tag) -> Tag:
        """Functions of numbers, of `math` and numpy."""
        if every & ROWS and name in _STEPS:
            self._chosen(node)
        return every & ROWS if name in _NUMBERS else NONE

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
        if name in _LOOKUPS and every & ROWS and (base & STATE or isinstance(method.value, ast.Dict)):
            self.problem(_CHOICE, text_of(node), node)
        if name in _SLOTS and arguments and (arguments[0][1] | base) & OLD:
            self.problem(Why.GRAPH_WRITES_STATE, text_of(node.args[0]), node)
        result = self._own(name, arguments, 1) | self._of_number(node, name, every)
        if name in _PARTS and base & STATE:
            result |= STATE if name != "copy" else HOLDS
        return result

    def _owner(self, method: ast.Attribute) -> Tag:
        """Of the object whose method is called. `cfg.get(...)` asks for `cfg.get`, not for all of `cfg`."""
        names, handed = dict(self.names), set(self.handed)
        owner = self.of(method.value)
        if isinstance(method.value, (ast.Name, ast.Attribute)):
            self.names = names
            self.of(method)
            self.handed = handed
        self.attributes.add(method.attr)
        self.any_attribute = self.any_attribute or method.attr in _REFLECTS or asks_for_attributes(method)
        return owner
