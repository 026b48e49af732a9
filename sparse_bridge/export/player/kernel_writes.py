"""Which arguments of a compiled kernel lead to memory that it writes, read from Triton's intermediate code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

BEHIND_TABLES = -1  # memory whose addresses a kernel reads from memory
_VALUE = re.compile(r"%[\w$.-]+")
_FUNCTION = re.compile(r"^\s*tt\.func\b[^(]*\((.*)$")
_PARAMETER = re.compile(r"(%[\w$.-]+): ([^\s,){]+)")
_OPERATION = re.compile(r"^\s*(?:%[\w$.-]+(?::\d+)?\s*=\s*)?\"?([a-z_]+\.[\w.]+)")
# What makes an address of addresses, and what only reads through one. All else is taken to write.
_DERIVED = frozenset(
    {
        *("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast", "tt.reshape", "tt.trans"),
        *("tt.unsplat", "arith.select"),
    }
)
_READ = frozenset({"tt.load"})


def code_of(metadata: Any) -> str | None:
    """Triton's intermediate code of a kernel by its metadata; None where its cache does not hold it."""
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ttir")
    if path is None:
        return None
    with open(path) as file:
        return file.read()


def written_arguments(code: str | None, types: Sequence[str]) -> frozenset[int]:
    """Numbers of the arguments that a kernel writes through, with BEHIND_TABLES where it writes to addresses that it
    has read.

    code: Triton's intermediate code after inlining.  types: of the arguments, as Triton's signatures have them;
        pointers begin with "*".  All pointers are taken to be written through where the code cannot tell.
    """
    everything = frozenset({BEHIND_TABLES, *(i for i, kind in enumerate(types) if kind.startswith("*"))})
    lines = (code or "").splitlines()
    starts = [i for i, line in enumerate(lines) if _FUNCTION.match(line)]
    if len(starts) != 1:
        return everything
    head = _FUNCTION.match(lines[starts[0]])
    assert head is not None
    parameters = [name for name, _ in _PARAMETER.findall(head[1])]
    if len(parameters) != len(types):
        return everything
    leads_to = {name: {i} for i, name in enumerate(parameters) if types[i].startswith("*")}
    written = set[int]()
    for line in lines[starts[0] + 1 :]:
        operation = _OPERATION.match(line)
        names = _VALUE.findall(line.partition(" loc(")[0])
        operands = names[1:] if operation is not None and "=" in line[: operation.start(1)] else names
        reached = set[int]().union(*(leads_to.get(name, ()) for name in operands))
        kind = operation[1] if operation is not None else ""
        if kind == "tt.int_to_ptr":
            leads_to[names[0]] = {BEHIND_TABLES}
        elif reached and kind in _DERIVED:
            leads_to[names[0]] = reached
        elif reached and kind not in _READ:
            written |= reached
            leads_to.update((name, reached) for name in names if name not in leads_to)  # of a loop, say
    return frozenset(written)
