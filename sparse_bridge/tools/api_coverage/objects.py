"""What can be told of classes and functions: attributes of objects, refusals."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from ...errors import SparseBridgeError

__all__ = ["has_attribute", "last_name", "refuses", "stored", "targets"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Arguments that make an object to look at, where a class needs them or its defaults will not do.
_ALWAYS = {"kernel_size": 3, "dimension": 3, "D": 3}
_EXAMPLES = {
    **dict.fromkeys(("in_channels", "out_channels", "in_channel", "out_channel"), 4),
    **dict.fromkeys(("in_features", "out_features", "num_features", "inplanes", "planes"), 4),
    **dict.fromkeys(("num_point_features", "max_num_voxels", "max_num_points_per_voxel"), 4),
    "channel": 16,
    "ndim": 3,
    "stride": 2,
    "operation_type": 0,
    "shape": [4, 4, 4],
    "vsize_xyz": [1.0],
    "coors_range_xyz": [0.0, 4.0],
}
_REGISTERS = ("register_buffer", "register_parameter")


def has_attribute(owner: type, name: str) -> bool:
    """Whether objects of a class have an attribute: the class has it, says its type, or stores it
    in `self` in one of its methods, or an object that can be made has it."""
    if hasattr(owner, name) or any(name in _stored_by(base) for base in owner.__mro__):
        return True
    return hasattr(_example(owner), name)


@functools.cache
def _example(owner: type) -> Any:
    """An object of a class, None where its arguments are not known."""
    arguments = {}
    for name, parameter in inspect.signature(owner).parameters.items():
        needed = parameter.default is parameter.empty
        if name in _ALWAYS or (needed and name in _EXAMPLES):
            arguments[name] = _ALWAYS.get(name, _EXAMPLES.get(name))
    try:
        return owner(**arguments)
    except (SparseBridgeError, TypeError, ValueError):
        return None


@functools.cache
def _stored_by(cls: type) -> frozenset[str]:
    names = set(getattr(cls, "__annotations__", ()))
    if cls.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
        return frozenset(names)
    for member in vars(cls).values():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if inspect.isfunction(function):
            names.update(stored(_parsed(function)))
    return frozenset(names)


def stored(tree: ast.AST) -> Iterator[str]:
    """What functions store in `self`, buffers and parameters among it."""
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                yield target.attr
        registers = isinstance(node, ast.Call) and last_name(node.func) in _REGISTERS and node.args
        if registers and isinstance(registers[0], ast.Constant):
            yield str(registers[0].value)


def targets(statement: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        yield statement.target


def last_name(expression: ast.expr) -> str:
    """`Module` of `torch.nn.Module`, `Module[int]` or `Module()`."""
    if isinstance(expression, (ast.Call, ast.Subscript)):
        return last_name(expression.func if isinstance(expression, ast.Call) else expression.value)
    return str(getattr(expression, "attr", getattr(expression, "id", "")))


def refuses(member: Any) -> bool:
    """Whether a function, or making an object of a class, does nothing but raise."""
    function = vars(member).get("__init__") if isinstance(member, type) else member
    if not inspect.isfunction(function):
        return False
    parts = ast.walk(_parsed(function))
    definition = next((part for part in parts if isinstance(part, _FUNCTIONS)), None)
    steps = definition.body if definition else []
    if steps and isinstance(steps[0], ast.Expr) and isinstance(steps[0].value, ast.Constant):
        steps = steps[1:]  # its documentation
    return bool(steps) and isinstance(steps[0], ast.Raise)


@functools.cache
def _parsed(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):  # made while running
        return ast.Module([], [])
