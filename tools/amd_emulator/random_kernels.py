"""Random kernels, and what Triton's own interpreter says they compute.

`Kernel(seed)` is the source of a kernel over blocks of 256 values with its inputs: arithmetic of
integers and floats, conversions, masked and gathered loads, sums, scans, products of matrices,
loops and atomics. Floats are kept finite and sums of them are exact, so that every machine must
give the same bits.

    TRITON_INTERPRET=1 python -m amd_emulator.random_kernels FILE SEED ...

writes the interpreter's answers.
"""

from __future__ import annotations

import importlib.util
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence

import torch

N, SIDE, STEPS = 256, 16, 20
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def kernel({parameters}, out, counts, rounds, N: tl.constexpr, SIDE: tl.constexpr):
    row = tl.arange(0, N)
"""


def _bits(kind: str) -> int:
    return int(kind.lstrip("uintfloa"))


class Kernel:
    """source: text of the module.  inputs: one vector of N per type.  n_values: vectors that the
    kernel stores as int64 or float64, one after another."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.kinds: list[str] = []
        self.lines: list[str] = []
        self.inputs = []
        for kind in (*INTS, *FLOATS):
            self._add(kind, f"tl.load(p{len(self.inputs)} + row)")
            self.inputs.append(_values(kind, generator))
        for _ in range(STEPS):
            kind, text = self._step()
            self._add(kind, f"({text}).to(tl.{kind})")
        self.n_values = len(self.kinds)

    @property
    def source(self) -> str:
        head = _HEAD.format(parameters=", ".join(f"p{i}" for i in range(len(self.inputs))))
        stores = [
            f"tl.store(out + {i} * N + row, v{i}.to(tl.{'int64' if kind in INTS else 'float64'})"
            f"{'' if kind in INTS else '.to(tl.int64, bitcast=True)'})"
            for i, kind in enumerate(self.kinds)
        ]
        return head + "".join(f"    {line}\n" for line in (*self.lines, *stores))

    def _add(self, kind: str, text: str) -> None:
        name = f"v{len(self.kinds)}"
        self.lines.append(f"{name} = {text}")
        if kind in FLOATS:
            finite = f"tl.where(({name} > -900.0) & ({name} < 900.0), {name}, 1.5)"
            # Minima and maxima of zeros of both signs may have either.
            self.lines.append(f"{name} = ({finite} + 0.0).to(tl.{kind})")
        self.kinds.append(kind)

    def _pick(self, among: Sequence[str]) -> int:
        return self.rnd.choice([i for i, kind in enumerate(self.kinds) if kind in among])

    def _step(self) -> tuple[str, str]:
        """(type, expression) of the next value."""
        makers = [self._integers] * 8 + [self._floats] * 5 + [self._cast] * 2
        makers += [self._gather, self._reduction, self._scan, self._product, self._loop]
        return self.rnd.choice(makers + [self._atomic])()

    def _integers(self) -> tuple[str, str]:
        i = self._pick(INTS)
        kind = self.kinds[i]
        j, k = self._pick([kind]), self._pick([kind])
        shift, last = self.rnd.randrange(_bits(kind)), _bits(kind) - 1
        texts = [f"v{i} {op} v{j}" for op in ("+", "-", "*", "&", "|", "^")]
        texts += [f"v{i} << {shift}", f"v{i} >> {shift}", f"v{i} >> (v{j} & {last})", f"~v{i}"]
        texts += [f"tl.minimum(v{i}, v{j})", f"tl.maximum(v{i}, v{j})", f"0 - v{i}"]
        texts += [f"tl.where(v{i} {op} v{j}, v{k}, v{i})" for op in ("<", "<=", "==", ">", "!=")]
        if _bits(kind) >= 32:
            texts += [f"(v{i} >> 1) // (v{j} | 1)", f"(v{i} >> 1) % (v{j} | 1)"]
            texts += [f"tl.umulhi(v{i}, v{j})"] if kind[0] == "u" else []
        return kind, self.rnd.choice(texts)

    def _floats(self) -> tuple[str, str]:
        i = self._pick(FLOATS)
        kind = self.kinds[i]
        j, k = self._pick([kind]), self._pick([kind])
        texts = [f"v{i} {op} v{j}" for op in ("+", "-", "*")] * 2
        texts += [f"tl.minimum(v{i}, v{j})", f"tl.maximum(v{i}, v{j})", f"-v{i}", f"tl.abs(v{i})"]
        texts += [f"tl.where(v{i} {op} v{j}, v{k}, v{i})" for op in ("<", ">=", "==")]
        if kind == "float32":
            texts += [f"tl.div_rn(v{i}, tl.abs(v{j}) + 1.0)", f"tl.sqrt_rn(tl.abs(v{i}))"]
            texts += [f"tl.floor(v{i})", f"tl.ceil(v{i})"]
        return kind, self.rnd.choice(texts)

    def _cast(self) -> tuple[str, str]:
        i = self.rnd.randrange(len(self.kinds))
        to = self.rnd.choice(INTS + FLOATS)
        source = self.kinds[i]
        if source in FLOATS and to in INTS:  # in range
            return to, f"tl.minimum(tl.maximum(v{i}, 0.0), 100.0).to(tl.int32)"
        if source in INTS and to in FLOATS:  # exact
            return to, f"(v{i} & 127).to(tl.int32)"
        if source == "float64" and to == "float16":  # a direct one may round twice
            return to, f"v{i}.to(tl.float32)"
        return to, f"v{i}"

    def _gather(self) -> tuple[str, str]:
        i, j = self._pick(INTS), self._pick(INTS)
        p = self.rnd.randrange(len(self.inputs))
        kind = (INTS + FLOATS)[p]
        mask = f"(v{j} & {self.rnd.choice((1, 3, 6))}) != 0"
        return kind, f"tl.load(p{p} + (v{i}.to(tl.int64) & (N - 1)), mask={mask}, other=3)"

    def _reduction(self) -> tuple[str, str]:
        i, axis = self._pick(["int32", "int64"]), self.rnd.randrange(2)
        op = self.rnd.choice(("sum", "max", "min"))
        spread = "[None, :]" if axis == 0 else "[:, None]"
        square = f"tl.reshape(v{i}, (SIDE, SIDE))"
        whole = f"tl.{op}({square}, {axis}){spread} + tl.zeros((SIDE, SIDE), tl.{self.kinds[i]})"
        return self.kinds[i], f"tl.reshape({whole}, (N,))"

    def _scan(self) -> tuple[str, str]:
        i = self._pick(["int32", "int64"])
        square = f"tl.reshape(v{i}, (SIDE, SIDE))"
        return self.kinds[i], f"tl.reshape(tl.cumsum({square}, {self.rnd.randrange(2)}), (N,))"

    def _product(self) -> tuple[str, str]:
        i, j = self._pick(INTS), self._pick(INTS)
        kind = self.rnd.choice(("float16", "float32"))
        a, b = (f"tl.reshape((v{k} & 7).to(tl.{kind}), (SIDE, SIDE))" for k in (i, j))
        if self.rnd.random() < 0.5:
            b = f"tl.trans({b})"
        product = f"tl.dot({a}, {b}, input_precision='ieee')"
        return "int32", f"tl.reshape({product}, (N,)).to(tl.int32)"

    def _loop(self) -> tuple[str, str]:
        i, name = self._pick(["int32", "int64"]), f"s{len(self.kinds)}"
        self.lines += [
            f"{name} = v{i}",
            f"for turn in range(rounds + {self.rnd.randrange(3)}):",
            f"    {name} = {name} * 3 + (v{i} >> turn)",
        ]
        return self.kinds[i], name

    def _atomic(self) -> tuple[str, str]:
        """Sums of integers by counter, which do not depend on the order."""
        i, j = self._pick(INTS), self._pick(["int32"])
        place = f"counts + {len(self.kinds)} * 64 + (v{i} & 63).to(tl.int32)"
        self.lines.append(f"tl.atomic_add({place}, v{j}, mask=row % 3 != 0)")
        return "int32", f"v{j} ^ 5"


def _values(kind: str, generator: torch.Generator) -> torch.Tensor:
    """N values: integers of every magnitude, floats of moderate ones."""
    if kind in FLOATS:
        size = 10.0 ** torch.randint(-3, 3, (N,), generator=generator)
        return (torch.randn(N, generator=generator) * size).to(getattr(torch, kind))
    random_bits = torch.randint(-(2**63), 2**63 - 1, (N,), generator=generator)
    shifted = random_bits >> torch.randint(64 - _bits(kind), 64, (N,), generator=generator)
    signed = shifted.to(getattr(torch, f"int{_bits(kind)}"))
    return signed.view(getattr(torch, kind))


def run(seed: int, **options: object) -> tuple[torch.Tensor, torch.Tensor, object]:
    """What kernel `seed` stores: values int64 [n, N], counts int32 [n, 64]; and what Triton made of
    it, None in the interpreter."""
    kernel = Kernel(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"random_{seed}.py"
        path.write_text(kernel.source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        out = torch.full((kernel.n_values, N), 113, dtype=torch.int64)
        counts = torch.zeros((kernel.n_values, 64), dtype=torch.int32)
        compiled = module.kernel[(1,)](*kernel.inputs, out, counts, 4, N=N, SIDE=SIDE, **options)
    return out, counts, compiled


if __name__ == "__main__":
    torch.save([run(int(seed))[:2] for seed in sys.argv[2:]], sys.argv[1])
