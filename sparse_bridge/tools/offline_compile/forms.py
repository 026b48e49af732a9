"""How the forms of a kernel are declared.

A `Form` is what Triton's specialisation tells apart; a `Space` is a kernel with the factors that
choose among its forms. The product of all factors runs into the hundred thousands, so what gets
compiled is a covering part of it: every level of every factor at least once; for the products every
tile with every dtype and precision, the default ones twice, with the flags in different company
each time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...kernels.runtime.launch import REGISTRY, Kernel
from ...kernels.runtime.parts import Part

# Triton's names of what a tensor holds.
POINTED = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Where tensors lie: aligned to 16 bytes and within 2 GiB of memory, anywhere, aligned beyond 2 GiB.
ALIGNS = ("small", "odd", "large")
# Vectors of any float, read once per program.
CONVERTED = frozenset({"bias_ptr", "mean_ptr", "var_ptr", "gain_ptr", "beta_ptr", "residual_ptr"})


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of a kernel: what Triton's specialisation looks at.

    types: Triton's types of the arguments before the constexprs ("*fp16", "i32").  constants: the
    constexprs.  options: num_warps, num_stages, vendor options, sorted.  divisible: arguments that
    are multiples of 16.  ones: integers that are 1.  large: a tensor's memory exceeds 2 GiB (told
    apart on AMD alone, which addresses smaller ones by 32-bit offsets).
    """

    kernel: str
    types: tuple[str, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]
    divisible: frozenset[str] = frozenset()
    ones: frozenset[str] = frozenset()
    large: bool = False

    @property
    def jit(self) -> Kernel:
        """The kernel itself."""
        return REGISTRY[self.kernel]

    @property
    def launched(self) -> Form:
        """Without what `as_launched` cannot tell, and without the dtype of vectors that are
        converted where they are read."""
        names = self.jit.fn.arg_names
        types = tuple("*" if name in CONVERTED else dtype for name, dtype in zip(names, self.types, strict=False))
        return Form(self.kernel, types, self.constants, self.options)

    @property
    def tile(self) -> tuple[Any, ...]:
        """What a tile, a dtype and a precision fix."""
        block = [v for n, v in self.named.items() if n.startswith(("BLOCK", "PRECISION"))]
        return self.options, self.types[0], *block

    @property
    def named(self) -> dict[str, Any]:
        """The constexprs by name."""
        return dict(zip(self.jit.constants, self.constants, strict=True))


@dataclasses.dataclass(frozen=True)
class Space:
    """The forms of one kernel: `build` makes a form of one level of each factor.

    Levels stand heaviest first.  main: the factor of which every level is compiled `rows` times;
    the others take turns beside it.  lone: its forms complete those of another space, whose flags
    are seen there.  silent: factors which `as_launched` cannot tell.
    """

    factors: Mapping[str, Sequence[Any]]
    build: Callable[..., Form]
    main: str | None = None
    rows: int = 2
    lone: bool = True
    silent: tuple[str, ...] = ()

    def all(self) -> Iterator[Form]:
        """The product of all factors."""
        yield from self._product(self.factors)

    def holds(self, form: Form) -> bool:
        """Whether a launch, as `as_launched` gives it, is among the forms."""
        sides = {n: s[:1] if n in self.silent else s for n, s in self.factors.items()}
        if not all(sides.values()):
            return False
        if self.main:
            first = {name: side[0] for name, side in sides.items()}
            sides[self.main] = [
                case for case in sides[self.main] if self.build(**{**first, self.main: case}).tile == form.tile
            ]
        return any(variant.launched == form for variant in self._product(sides))

    def _product(self, sides: Mapping[str, Sequence[Any]]) -> Iterator[Form]:
        for levels in itertools.product(*sides.values()):
            yield self.build(**dict(zip(sides, levels, strict=True)))

    def covering(self) -> list[Form]:
        """The covering part, in a fixed order."""
        flags = {name: len(levels) for name, levels in self.factors.items() if name != self.main}
        cases: Sequence[Any] = self.factors[self.main] if self.main else (None,)
        turns = self.rows if self.main else max(flags.values())
        rows = [(case, _turn(flags, number, turn)) for number, case in enumerate(cases) for turn in range(turns)]
        covered = {level for _, row in rows for level in row.items()}
        if self.lone:
            for turn in range(max(flags.values())):
                row = {name: turn % size for name, size in flags.items()}
                if not covered.issuperset(row.items()):
                    rows.append((cases[turn % len(cases)], row))
        built = []
        for case, row in rows:
            levels = {name: self.factors[name][index] for name, index in row.items()}
            built.append(self.build(**levels, **({self.main: case} if self.main else {})))
        return list(dict.fromkeys(built))


def _turn(flags: Mapping[str, int], number: int, turn: int) -> dict[str, int]:
    """Levels of the flags in one row of a case: the heaviest first, then others in turn, in
    different company for every case."""
    row, radix = {}, 1
    for name, size in flags.items():
        row[name] = (turn + number // radix) % size if turn else 0
        radix = radix * size if radix * size < 64 else 1
    return row


def make(
    kernel: Kernel,
    constants: tuple[Any, ...],
    options: Mapping[str, int],
    divisible: Sequence[str] = (),
    ones: Sequence[str] = (),
    align: str = "",
    **types: str,
) -> Form:
    """A form. types: by argument name without `_ptr`; those not named are int32, or pointers to
    it.  align: one of `ALIGNS`, of all tensors; else `divisible` names what is aligned."""
    names = kernel.fn.arg_names[: len(kernel.fn.arg_names) - len(kernel.constants)]
    arguments = []
    for name in names:
        pointer = name.endswith("_ptr")
        arguments.append("*" * pointer + types.pop(name.removesuffix("_ptr"), "i32"))
    if types or len(constants) != len(kernel.constants):
        raise TypeError(f"{kernel.name} takes {names} and {kernel.constants}; declared are {types} and {constants}.")
    if align in ("small", "large"):
        general = {p.name for p in getattr(kernel.fn, "params", ()) if p.do_not_specialize}
        divisible = [name for name in names if name.endswith("_ptr") and name not in general]
    return Form(
        kernel.name,
        tuple(arguments),
        constants,
        tuple(sorted(options.items())),
        frozenset(divisible),
        frozenset(ones),
        align == "large",
    )


def as_launched(kernel: Kernel, args: Sequence[Any], constants: tuple[Any, ...], options: Mapping[str, int]) -> Form:
    """What `Kernel.launch` was called with, for `catalogue.launchable`."""
    types = []
    for arg in args:
        if isinstance(arg, (torch.Tensor, Part)):
            types.append("*" + POINTED[arg.dtype])
        elif isinstance(arg, float):
            types.append("fp32")
        else:
            types.append("i32" if -(1 << 31) <= arg < 1 << 31 else "i64")
    return Form(kernel.name, tuple(types), constants, tuple(sorted(options.items()))).launched
