"""Launching: the registry of every jit function, and a direct path to kernels that are already
compiled.

`Kernel.launch` goes through Triton's ordinary `kernel[grid](...)` the first time and whenever the
target is not a real GPU; afterwards it calls the compiled kernel's own launcher, which skips
Triton's argument analysis. The caller's `key` must therefore separate everything that analysis
looks at: dtypes, constexprs, options, and for each pointer or integer that is not
`do_not_specialize` its divisibility by 16 and, for integers, being 1 (`specialise` builds such
keys); `Kernel.variant` adds what one backend alone looks at.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from . import compile_processes, precompile
from . import target as targets
from .parts import Part, viewed
from .target import Target
from .triton_compat import (
    HOOKS,
    PASS_CONSTEXPRS,
    Entry,
    launcher_of,
    loading,
    name_constexprs,
    without_buffer_operations,
)

REGISTRY: dict[str, Kernel] = {}
_NUMBERS = frozenset({int, float, bool})


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own is a jit object and costs microseconds on the host.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def specialise(*numbers: int) -> tuple[int, ...]:
    """Classes that Triton's specialisation tells apart: 1, divisible by 16, other; and 64-bit apart
    from 32-bit."""
    return tuple(
        [(1 if n == 1 else 2 if n % 16 == 0 else 0) + (0 if -(1 << 31) <= n < 1 << 31 else 4) for n in numbers]
    )


_numbers: dict[Hashable, int] = {}
_next = itertools.count()


def number_of(key: Hashable) -> int:
    """A small number for a key, for the life of the process: cheap to hash in every launch."""
    return _numbers.setdefault(key, next(_next))


def numbers() -> dict[Hashable, int]:
    """All numbers that were given, by key."""
    return dict(_numbers)


def alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which tensors, of any shape and dtype, start at a multiple of 16 bytes; Triton's specialisation tells them
    apart, one by one."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


def alignment_at(*addresses: int) -> tuple[bool, ...]:
    """`alignment` of addresses."""
    return tuple([at % 16 == 0 for at in addresses])


# Multiply-adds round once; said aloud, since Triton 3.9 warns of a new default to come.
OPTIONS = {"enable_fp_fusion": True}


def _beyond_2_gib(arg: Any) -> bool:
    arg = arg.memory if type(arg) is Part else arg
    return isinstance(arg, torch.Tensor) and arg.untyped_storage().nbytes() >= 1 << 31


def _addressing(small_pointers: bool, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """Around what may compile a kernel for AMD: buffer operations, which take 32-bit offsets, have
    been miscompiled beside tensors of more than 2 GiB."""
    if small_pointers and any(map(_beyond_2_gib, args)):
        return without_buffer_operations()
    return contextlib.nullcontext()


def _values(args: Sequence[Any]) -> list[Any]:
    """Addresses instead of tensors: the launcher asks the driver about every tensor."""
    return [arg if type(arg) in _NUMBERS else arg.data_ptr() for arg in args]


class _Launch(NamedTuple):
    """What `Kernel.launch` was called with.  device: its number.  small_pointers: of its target."""

    device: int
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: dict[str, Any]
    key: Hashable
    small_pointers: bool


def _launch_of(
    device: int,
    target: Target,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
    key: Hashable,
) -> _Launch:
    """A launch as Triton sees it."""
    small, tensors = target.generation.small_pointers, tuple(map(viewed, args))
    return _Launch(device, grid, tensors, constants, options, key, small)


def begin(
    entry: Entry, index: int, grid: tuple[int, int, int], values: Sequence[Any], constants: tuple[Any, ...]
) -> bool:
    """`Kernel.start` of a compiled variant. Twin in C: `may_launch`."""
    hook = HOOKS.launch_enter_hook
    if index != torch._C._cuda_getDevice() or getattr(hook, "calls", hook):
        return False
    if precompile.dry_runs and precompile.futures() is not None:
        return False
    call, prefix, between = entry
    stream = torch._C._cuda_getCurrentRawStream(index)
    if PASS_CONSTEXPRS:
        call(*prefix, *grid, stream, *between, *values, *constants)
    else:
        call(*prefix, *grid, stream, *between, *values)
    return True


class Kernel:
    """A jit function with a cache of its compiled variants, per device."""

    def __init__(self, fn: Any, constants: tuple[str, ...]) -> None:
        self.fn = fn
        self.name: str = fn.__name__.lstrip("_")
        self.constants = constants
        self._compiled: dict[Hashable, Entry] = {}
        self._coming: dict[Hashable, Future[Any]] = {}

    def launch(
        self,
        device: torch.device,
        target: Target,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        key: Hashable,
    ) -> None:
        """Run the kernel. `args`, with tensors or parts of them, and `constants` are positional,
        in signature order, constexprs last.

        device: the tensors' device.  options: num_warps, num_stages and vendor options.  key: see
        the module's text.
        """
        beforehand = precompile.futures() if precompile.dry_runs else None
        if not target.raw:
            if beforehand is None:
                args = tuple(map(viewed, args))
                with _addressing(target.generation.small_pointers, args):
                    self.fn[grid](*args, *constants, **OPTIONS, **options)
            return
        if target.generation.small_pointers:
            key = self.variant(target, args, key)
        index = targets.device_index(device) if device.index is None else device.index
        if beforehand is not None:
            self._compile(_launch_of(index, target, grid, args, constants, options, key), beforehand)
            return
        if not self.start(index, key, grid, _values(args), constants):
            with torch.cuda.device(index):
                self._launch_slowly(_launch_of(index, target, grid, args, constants, options, key))

    def compiled(self, index: int, key: Hashable) -> Entry | None:
        """The compiled variant of GPU `index`, if there is one. Twin in C: `pass_of`."""
        return self._compiled.get((index, key))

    def start(
        self, index: int, key: Hashable, grid: tuple[int, int, int], values: Sequence[Any], constants: tuple[Any, ...]
    ) -> bool:
        """Run a compiled variant on the current stream of GPU `index`; values: numbers, and
        addresses for tensors.

        False where there is none, that GPU is not the current one, or somebody listens to launches,
        of which only Triton's own call tells: then nothing ran."""
        entry = self._compiled.get((index, key))
        return entry is not None and begin(entry, index, grid, values, constants)

    def launch_plain(
        self,
        device: torch.device,
        target: Target,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        key: Hashable,
    ) -> None:
        """`launch` of a kernel that takes all its tensors first, of any shape and dtype; by their addresses where it
        can, which takes half as long."""
        if target.takes_addresses:
            values = *[tensor.data_ptr() for tensor in tensors], *numbers
            if self.start(device.index, key, grid, values, constants):
                return
        self.launch(device, target, grid, (*tensors, *numbers), constants, options, key)

    @staticmethod
    def variant(target: Target, args: tuple[Any, ...], key: Hashable) -> Hashable:
        """The caller's key, completed by what Triton's backend adds to the specialisation on its
        own."""
        if not target.generation.small_pointers:
            return key
        # Tensors within 2 GiB of memory are addressed through 32-bit byte offsets there.
        return key, tuple(map(_beyond_2_gib, args))

    def _launch_slowly(self, it: _Launch) -> None:
        key = (it.device, it.key)
        coming = self._coming.pop(key, None)
        if coming is not None and not coming.cancel():
            coming.exception()  # waits; what failed there fails again below, to the caller's face
        if self.start(it.device, it.key, it.grid, _values(it.args), it.constants):
            return
        with loading(), _addressing(it.small_pointers, it.args), compile_processes.worker_first(self.fn):
            compiled = self.fn[it.grid](*it.args, *it.constants, **OPTIONS, **it.options)
        self._compiled[key] = launcher_of(compiled)

    def _compile(self, it: _Launch, futures: list[Future[Any]]) -> None:
        """Have a variant compiled in the background."""
        key = (it.device, it.key)
        if key in self._compiled:
            return

        def compile_it() -> None:
            with (
                torch.cuda.device(it.device),
                _addressing(it.small_pointers, it.args),
                compile_processes.worker_first(self.fn, begin=True),
            ):
                compiled = self.fn.warmup(*it.args, *it.constants, grid=it.grid, **OPTIONS, **it.options)
                self._compiled[key] = launcher_of(compiled)

        if key not in self._coming:
            self._coming[key] = precompile.submit(compile_it)
        futures.append(self._coming[key])


def register(fn: Any) -> Kernel:
    """Enter a `@triton.jit` function into the registry; the result launches it. Raises TypeError where its constexpr
    parameters do not come last."""
    names = getattr(fn, "arg_names", None) or list(fn.signature.parameters)
    parameters = getattr(fn, "params", None)
    if parameters is not None:
        constants = tuple(p.name for p in parameters if p.is_constexpr)
    else:  # interpreted functions keep no more than the Python function
        annotations = fn.fn.__annotations__
        constants = tuple(n for n in names if "constexpr" in str(annotations.get(n, "")))
    kernel = Kernel(fn, constants)
    name_constexprs(fn)
    if constants and tuple(names[-len(constants) :]) != constants:
        raise TypeError(f"{kernel.name}: constexpr parameters must come last")
    REGISTRY[kernel.name] = kernel
    return kernel
