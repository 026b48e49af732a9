"""Break one line of the package at a time, and see which tests notice:

    python tools/mutate.py sparse_bridge/core/conv/history.py --tests tests/core/conv --count 20

works in a copy of the checkout. A mutant is one change of a decision: a condition turned round, a
bound moved by one, a result or a call left out; in C as well as in Python. Each runs the tests in a
process of its own, which ends at the first that fails; `--all` counts all that fail. Survivors are
what no test noticed: some mean the same as the original, the others want a test. `--seed` draws
other mutants, `--lines 20-80` names the place.
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("sparse_bridge", "tests", "tools", "compat", "benchmarks", "docs", "examples", "pyproject.toml", "setup.py")
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
# Calls whose absence changes no result: what is written for people.
_TELLS = re.compile(r"\b(log|logger|warnings|_say|debug|info|warning)\b")
_IN_C = (
    (re.compile(r"(?<![=!<>-])([=!])=(?!=)"), lambda m: "!=" if m[1] == "=" else "=="),
    (re.compile(r"&&"), lambda m: "||"),
    (re.compile(r"\|\|"), lambda m: "&&"),
    (re.compile(r" < "), lambda m: " <= "),
    (re.compile(r" > "), lambda m: " >= "),
    (re.compile(r" \+ "), lambda m: " - "),
    (re.compile(r"\bif \((?=[^;{]*\) ?\{?$)"), lambda m: "if (!"),
)


class Mutant(NamedTuple):
    """A file with one change. start, end: of the text that `new` replaces."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:70] for text in (self.old, self.new))
        return f"{self.path}:{self.line}: {old}  ->  {new}"


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(what is replaced, by which text) for a node of Python."""
    text = ast.unparse
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, f"(not ({text(node.test)}))"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"({text(node.left)} {OTHER[type(node.ops[0])]} {text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, "(" + word.join(f"({text(one)})" for one in node.values) + ")"
    elif isinstance(node, ast.Return) and node.value is not None and text(node.value) != "None":
        yield node.value, "None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _TELLS.search(text(node)):
        yield node, "pass"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield node, f"(({text(node.left)}) {sign} ({text(node.right)}))"
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    ):
        yield node, "pass"


def decisions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside functions, but for annotations, checks and what is raised."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, (ast.Assert, ast.Raise)):
            continue
        if inside:
            yield node
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            body = node.body if isinstance(node.body, list) else [node.body]
            todo.extend((one, True) for one in body)
        else:
            todo.extend((one, inside) for one in ast.iter_child_nodes(node))


def in_python(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file in Python."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in decisions(ast.parse(source)):
        for replaced, new in changes(node):
            start = lines[replaced.lineno - 1] + replaced.col_offset
            end = lines[replaced.end_lineno - 1] + replaced.end_col_offset
            yield Mutant(path, replaced.lineno, start, end, source.encode()[start:end].decode(), new)


def in_c(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file in C: of single lines inside of functions."""
    at = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = line.split("//")[0]
        if code.startswith(" ") and not code.lstrip().startswith(("*", "/*", "#")) and '"' not in code:
            for pattern, other in _IN_C:
                for match in pattern.finditer(code):
                    new = code[: match.start()] + other(match) + code[match.end() :]
                    if other(match) == "if (!":  # of all that the parentheses hold
                        new = f"{code[: match.start()]}if (!{code[match.end() - 1 : code.rindex(')')]})){code[code.rindex(')') + 1 :]}"
                    yield Mutant(path, number, at, at + len(code.encode()), code, new)
        at += len(line.encode())


def mutants(path: str) -> list[Mutant]:
    """Every mutant of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    return list((in_python if path.endswith(".py") else in_c)(path, source))


def _preload() -> None:
    """What every run imports: it is forked with it."""
    import hypothesis
    import numpy
    import pytest
    import torch
    import triton

    del hypothesis, numpy, pytest, torch, triton


def run(copy: pathlib.Path, tests: list[str], limit: float, all_of_them: bool) -> tuple[str, float, list[str]]:
    """(survived, noticed or endless; seconds; the tests that failed)."""
    log, began = copy / "log.txt", time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(log, "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True  # two mutants of one second and size would be one
        sys.path[:] = [
            str(copy),
            *(one for one in sys.path if pathlib.Path(one or ".").resolve() not in (ROOT, ROOT / "tools")),
        ]
        import pytest

        arguments = ["-q", "-p", "no:cacheprovider", "--tb=line", *([] if all_of_them else ["-x"]), *tests]
        os._exit(int(pytest.main(arguments)))
    status, outcome = 0, ""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            outcome = "endless"
            break
        time.sleep(0.05)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M)
    return outcome or ("noticed" if status else "survived"), time.monotonic() - began, failed


def main() -> int:
    """1 where a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="of the package, in Python or C")
    parser.add_argument("--tests", nargs="+", required=True, help="arguments of pytest")
    parser.add_argument("--marks", help="pytest's -m")
    parser.add_argument("--count", type=int, default=20, help="mutants, drawn from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", help="FIRST-LAST, of every file")
    parser.add_argument("--all", action="store_true", help="run on after the first test that fails")
    given = parser.parse_args()
    tests = [*given.tests, *(["-m", given.marks] if given.marks else [])]
    every = [one for path in given.files for one in mutants(path)]
    if given.lines:
        first, last = map(int, given.lines.split("-"))
        every = [one for one in every if first <= one.line <= last]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    _preload()
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        outcome, usual, failed = run(copy, tests, 3600, given.all)
        if outcome != "survived":
            print(f"the tests fail without any change: {failed}\n{(copy / 'log.txt').read_text()[-3000:]}")
            return 2
        print(f"{len(drawn)} of {len(every)} mutants; the tests take {usual:.0f} s", flush=True)
        for mutant in sorted(drawn):
            file = copy / mutant.path
            whole = file.read_bytes()
            file.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :])
            outcome, took, failed = run(copy, tests, 3 * usual + 60, given.all)
            file.write_bytes(whole)
            survivors += [mutant] if outcome == "survived" else []
            print(f"{outcome:8} {took:4.0f} s  {mutant}  {len(failed)} {failed[:1]}", flush=True)
    print(f"{len(survivors)} of {len(drawn)} survived:", *survivors, sep="\n  ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
