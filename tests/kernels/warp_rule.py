"""A rule of the source: threads are counted by the target's warp size, never by a number.

The same kernels run in waves of 32 and of 64 lanes; a product of num_warps and 32, or an
instruction of one vendor, is right on half of them.
"""

from __future__ import annotations

import ast

__all__ = ["fixed_warp_sizes"]

_SIZES = ("32", "64", "5", "6")  # 5 and 6: as shifts
_VENDOR_WORDS = ("inline_asm", "tl.extra", "libdevice", "shfl", "ballot", "warp", "wave_size")
_COUNTING = (ast.Mult, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift)


def fixed_warp_sizes(source: str) -> list[str]:
    """The expressions of a module's source that fix a warp size, and words in its jit functions
    that know warps."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, _COUNTING):
            sides = [ast.unparse(side) for side in (node.left, node.right)]
            if any("warps" in side for side in sides) and any(side in _SIZES for side in sides):
                found.append(ast.unparse(node))
    for function in ast.walk(tree):
        decorators = getattr(function, "decorator_list", ())
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            body = ast.unparse(function).split('"""')[-1]
            found += [f"{function.name}: {word}" for word in _VENDOR_WORDS if word in body]  # type: ignore[attr-defined]
    return found
