"""A warp size that is written down is seen, wherever it hides."""

from __future__ import annotations

import pytest

from tests.kernels.warp_rule import fixed_warp_sizes


@pytest.mark.parametrize(
    "line, seen",
    [
        ("block = num_warps * 32", "num_warps * 32"),
        ("block = 64 * options.num_warps", "64 * options.num_warps"),
        ("lanes = threads // 32 + warps << 5", "threads // 32 + warps << 5"),
        ("rows = warps << 6", "warps << 6"),
        ("lane = threads % 32 if warps % 32 else 0", "warps % 32"),
        ("block = num_warps * target.warp_size", None),
        ("block = 4 * 32", None),
        ("options = {'num_warps': 4}", None),
    ],
)
def test_arithmetic(line, seen):
    assert fixed_warp_sizes(line) == ([] if seen is None else [seen])


@pytest.mark.parametrize(
    "body",
    [
        "tl.inline_asm_elementwise('', '', [x], tl.int32, True, 1)",
        "lane = x % WARP_SIZE",
        "libdevice.ffs(x)",
        "warp = x // 2",
    ],
)
def test_words_of_one_vendor(body):
    code = f"@triton.jit\ndef _kernel(x_ptr):\n    x = tl.load(x_ptr)\n    {body}\n"
    known = "WARP_SIZE" in body  # an argument of that name would be right
    assert bool(fixed_warp_sizes(code)) != known
