"""What modules of a package keep between calls, what their owners forget, and which private names
tests touch: read from the sources.

State is a name of a module, or of a class in it, that functions rebind or change; an object of a
class of the same file whose methods change it; and a remembered answer to a call without arguments.
A remembered function of arguments is taken for a pure one, and a lock for no state.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

__all__ = ["forgotten", "kept", "touched", "trees"]

_CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop"),
    *("popitem", "put", "remove", "setdefault", "update"),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOCKS = {"Lock", "RLock"}
Trees = dict[str, ast.Module]


def trees(package: pathlib.Path) -> Trees:
    """Parsed files by module name; stand-ins keep what the framework that they mirror keeps."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if "standin" not in parts:
            found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_bytes())
    return found


def kept(files: Trees) -> set[str]:
    """All state, as "module.name" or "module.Class.name"."""
    return {f"{name}.{one}" for name, tree in files.items() for one in _kept_in(tree)}


def forgotten(files: Trees) -> set[str]:
    """What owners reach, themselves or through functions of their module, named alike."""
    found = set()
    for name, tree in files.items():
        for home, function in _owners(name, tree):
            found |= {f"{home}.{one}" for one in _reached(files[home], function)}
    return found


def touched(tests: pathlib.Path, files: Trees) -> list[tuple[str, str]]:
    """(file, "module.name") of every private name of a module that a test reads, replaces by name
    or imports. Names in capitals are constants: a test may read and lower them."""
    found = []
    for path in sorted(tests.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        where = str(path.relative_to(tests))
        found += [(where, name) for name in _touched_in(tree, set(files))]
    return found


def _last(node: ast.expr) -> str:
    """ "jit" of `triton.jit` and `triton.jit(...)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _root(node: ast.expr, classes: set[str]) -> str:
    """The name that an expression starts with; with the attribute behind it for a class."""
    chain = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        chain.append(node.attr if isinstance(node, ast.Attribute) else "")
        node = node.value
    name = node.id if isinstance(node, ast.Name) else ""
    return f"{name}.{chain[-1]}" if chain and name in classes else name


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr | None]:
    """Names that statements bind, and to what."""
    found: dict[str, ast.expr | None] = {}
    for node in body:
        for part in ast.walk(node) if isinstance(node, (ast.If, ast.Try)) else [node]:
            if isinstance(part, ast.Assign):
                for target in part.targets:
                    for one in ast.walk(target):
                        if isinstance(one, ast.Name):
                            found[one.id] = part.value
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found[part.target.id] = part.value
    return found


def _changed_by(function: ast.AST, classes: set[str]) -> set[str]:
    """What a function rebinds or changes, but for its own variables."""
    shared, own, found = set[str](), set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            shared.update(node.names)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            found.add(_root(node, classes))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
                found.add(_root(node.func.value, classes))
            elif _last(node) == "next" and node.args:
                found.add(_root(node.args[0], classes))
    return (found - own) | (shared & (found | own))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _kept_in(tree: ast.Module) -> set[str]:
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    names = _assigned(tree.body)
    known = {name for name, value in names.items() if value is None or _last(value) not in _LOCKS}
    for name, node in classes.items():
        known |= {f"{name}.{one}" for one in _assigned(node.body)}
    found = set()
    for function in _functions(tree):
        found |= _changed_by(function, set(classes)) & known
    for name, value in names.items():
        made_by = classes.get(_last(value)) if isinstance(value, ast.Call) else None
        if made_by is not None and _changes_itself(made_by):
            found.add(name)
    return found | {one.name for one in tree.body if _remembers(one)}


def _changes_itself(node: ast.ClassDef) -> bool:
    """Whether a method changes its object. That of `threading.local` is there to be changed."""
    return "local" in map(_last, node.bases) or any(
        "self" in _changed_by(ast.Module(method.body, []), set())
        for method in _functions(node)
        if method.name != "__init__"
    )


def _remembers(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and not ast.unparse(node.args)
        and bool({"cache", "lru_cache"} & set(map(_last, node.decorator_list)))
    )


def _owners(name: str, tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(module, function or expression) of all that this module marks with `owns`."""
    imported = _modules_of(name, tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "owns" in map(_last, node.decorator_list):
            yield name, node
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _last(call) == "owns":
            asked = call.args[0]
            home = imported.get(asked.value.id) if isinstance(asked.value, ast.Name) else None
            yield (name, asked) if home is None else (home, ast.Name(asked.attr, ast.Load()))


def _modules_of(name: str, tree: ast.Module) -> dict[str, str]:
    """Names that `from package import module` may have bound to modules."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            found.update({one.asname or one.name: f"{home}.{one.name}" for one in node.names})
    return found


def _reached(tree: ast.Module, start: ast.AST) -> set[str]:
    """Names of the module that a function reads, those behind the functions that it calls too."""
    functions = {node.name: node for node in tree.body if isinstance(node, _FUNCTIONS)}
    found, waiting = set[str](), [start]
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add(f"{node.value.id}.{node.attr}")
            if isinstance(node, ast.Name) and node.id not in found:
                found.add(node.id)
                if node.id in functions:
                    waiting.append(functions[node.id])
    return found


def _private(name: object) -> bool:
    return isinstance(name, str) and name[:1] == "_" and name[:2] != "__" and not name.isupper()


def _touched_in(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                bound[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]
    for name, target in _modules_of("", tree).items():
        home, _, last = target.rpartition(".")
        if home in modules and target not in modules and _private(last):
            yield target
        bound[name] = target
    for node in ast.walk(tree):
        owner, names = None, []
        if isinstance(node, ast.Attribute):
            owner, names = node.value, [node.attr]
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _last(node)[-4:] == "attr":
            owner, names = node.args[0], [getattr(node.args[1], "value", None)]
        elif isinstance(node, ast.Call) and node.args:  # `rules.set(module, _name=value)`
            owner, names = node.args[0], [one.arg for one in node.keywords]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            home, _, last = node.value.rpartition(".")
            if home in modules and _private(last):
                yield node.value
        private = [name for name in names if _private(name)]
        if owner is not None and private:
            first, _, rest = ast.unparse(owner).partition(".")
            module = ".".join([bound.get(first, ""), *([rest] if rest else [])])
            if module in modules:
                yield from (f"{module}.{name}" for name in private)
