"""What a network launches, written down: kernels of ours as Triton compiles them, and operations of
torch, which become launches, fills and constants, or are refused by name and line."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import os
import pathlib
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.runtime.target import Target
from ..plugin_checks import ExportError
from .kernel_writes import code_of, written_arguments
from .package_file import ADDRESS, FILL, LAUNCH, VALUE, Arg, Kernel, Step
from .stand_in import Compiled

# Bytes of numbers, by Triton's types, with the letter of `struct`.
_NUMBERS = {
    **dict.fromkeys(("i1", "i8"), "b"),
    **dict.fromkeys(("u1", "u8"), "B"),
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
_RESULT = 4  # among the arguments of `elementwise`
_SCRATCH = (Arg(VALUE, 8, 0),) * 2  # addresses of memory that our kernels do not take
# Whose lines are not the model's.
_PACKAGE = pathlib.Path(__file__).parents[2]
_TORCH = tuple(path + os.sep for path in torch.__path__)
_PYTHON = sysconfig.get_path("stdlib") + os.sep


@dataclasses.dataclass(eq=False)
class Storage:
    """Memory of a tensor, which it keeps alive, so that no other one gets its address.  written: it is filled
    by steps; else it is a constant.  begin, end: the first and the last step that need it; -1, none.
    reaches: storages whose addresses are among its values.  usable: False for what no step writes.  of_rows: it
    holds rows of a level, on whichever axis."""

    base: int
    size: int
    memory: torch.UntypedStorage
    written: bool
    begin: int = -1
    end: int = -1
    reaches: tuple[Storage, ...] = ()
    usable: bool = True
    of_rows: bool = False

    def content(self) -> bytes:
        """Its bytes now."""
        return self.values(torch.uint8).numpy().tobytes()

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as a vector of a dtype."""
        return torch.empty(0, dtype=dtype).set_(self.memory)  # type: ignore[call-overload]


class Recorder(TorchDispatchMode):
    """The steps of what runs under it, and of launches that it is told of.

    model: whose modules are named.  Addresses in steps are pairs of a storage's index and an offset until
    `memory_plan` knows where storages lie: `Arg.value` holds the index above 2^48.
    """

    def __init__(self, target: Target, model: nn.Module, lower: Callable[..., Any]) -> None:
        """lower: computes an operation of torch by kernels, see `operations`."""
        super().__init__()
        self.target, self.model, self._lower = target, model, lower
        self.steps: list[Step] = []
        self.kernels: dict[int, tuple[Compiled, Kernel]] = {}
        self.writes: list[frozenset[int]] = []  # of each kernel, see `written_arguments`
        self.extents: dict[int, int] = {}  # bytes behind an address that launches may reach
        self.storages: list[Storage] = []
        self.tables: dict[Any, Any] = {}  # of dense grids, by their geometry
        self._later: dict[int, list[Step]] = {}  # by the storage that they write, which nobody has needed yet
        self._norms: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        self._waits = False
        self._made: set[int] = set()  # bases of constants that the model computes
        self._read: set[int] = set()  # of those from which it does
        self.channels_last: set[int] = set()  # bases of grids that lie otherwise than torch's
        self.ambiguous: set[int] = set()  # of tensors that share memory here and not in torch, or the other way round
        self._by_base: dict[int, int] = {}
        self._bases: list[int] = []
        self.rows: Mapping[int, int] = {}  # capacities of levels whose rows may not be named by number

    # storages

    def index_of(self, tensor: torch.Tensor, written: bool = False) -> int:
        """The index of a tensor's storage. written: where it is new, steps fill it."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        index = self._by_base.get(base)
        if index is None or not base:
            index = self._by_base[base] = len(self.storages)
            self.storages.append(Storage(base, storage.nbytes(), storage, written))
            bisect.insort(self._bases, base)
        return index

    def storage_at(self, address: int) -> tuple[int, int] | None:
        """(index of the storage, offset) of an address; None where it leads to none."""
        place = bisect.bisect_right(self._bases, address) - 1
        if place < 0:
            return None
        index = self._by_base[self._bases[place]]
        offset = address - self._bases[place]
        return (index, offset) if offset < self.storages[index].size else None

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether steps fill a tensor's storage; constants are known now."""
        index = self._by_base.get(tensor.untyped_storage().data_ptr())
        return index is not None and self.storages[index].written

    def holds_rows(self, made: Sequence[torch.Tensor], of: Sequence[torch.Tensor] = ()) -> None:
        """Note that tensors which steps fill hold rows. of: if one of these does."""
        indices = [self._by_base.get(tensor.untyped_storage().data_ptr()) for tensor in of]
        if not of or any(index is not None and self.storages[index].of_rows for index in indices):
            for tensor in made:
                if tensor.numel() and self.is_written(tensor):
                    self.storages[self.index_of(tensor)].of_rows = True

    def by_rows(self, x: torch.Tensor, axis: int) -> bool:
        """Whether rows lie along this axis instead of the first one: how many are in use is not known."""
        index = self._by_base.get(x.untyped_storage().data_ptr())
        known = index is not None and self.storages[index].of_rows
        return known and x.shape[0] not in self.rows and x.shape[axis] in self.rows

    def computed(self, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Note constants that have been made, and those that were read for it."""
        self._read.update(tensor.untyped_storage().data_ptr() for tensor in read)
        self._made.update(tensor.untyped_storage().data_ptr() for tensor in made)

    def was_read(self, tensor: torch.Tensor) -> bool:
        """Whether the network has read memory so far."""
        base = tensor.untyped_storage().data_ptr()
        index = self._by_base.get(base)
        return base in self._read or (index is not None and self.storages[index].begin >= 0)

    def may_change(self, tensor: torch.Tensor) -> bool:
        """Whether memory may be changed in place: that of steps, and of constants that are new, unless a step reads
        what they are now."""
        base = tensor.untyped_storage().data_ptr()
        index = self._by_base.get(base)
        if index is None:
            return base in self._made or not base
        return self.storages[index].written or (base in self._made and self.storages[index].begin < 0)

    def _touch(self, index: int) -> None:
        storage, now = self.storages[index], len(self.steps)
        if not storage.usable:
            raise ExportError(f"{self.where()} reads values that no kernel computes here: the sorted keys of a sort.")
        storage.begin = now if storage.begin < 0 else storage.begin
        storage.end = now
        for other in storage.reaches:
            other.begin = now if other.begin < 0 else other.begin
            other.end = now

    def address(self, tensor: torch.Tensor) -> int:
        """How a step that comes next names a tensor's first element."""
        if tensor.numel() == 0:
            return 0
        index = self.index_of(tensor)
        if reached := getattr(tensor, "reaches", ()):
            self.storages[index].reaches = tuple(self.storages[self.index_of(other)] for other in reached)
        self._touch(index)
        return index << 48 | (tensor.data_ptr() - self.storages[index].base)

    # steps that nobody may need: coordinates in the order of a framework, say

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What is written down inside, by launches into one new tensor, waits until a step needs that tensor."""
        begin, self._waits = len(self.steps), True
        try:
            yield
        finally:
            self._waits = False
            steps = self.steps[begin:]
            del self.steps[begin:]
        if steps:
            written = {step.args[_RESULT].value >> 48 for step in steps}
            (index,) = written
            self._later[index] = steps
            self.storages[index].begin = self.storages[index].end = -1

    def norm_waits(self, y: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
        """A norm of these operands into y has been written down, and waits."""
        self._norms[self.index_of(y)] = y, operands

    def waiting_norm(self, y: torch.Tensor, replaced: bool) -> Sequence[torch.Tensor] | None:
        """The operands of a norm into y that nobody has needed yet; None where there is none. replaced: y is about to
        be written instead of it."""
        index = self.index_of(y)
        own, operands = self._norms.get(index, (y, ()))
        alike = own.data_ptr() == y.data_ptr() and own.shape == y.shape and own.stride() == y.stride()
        if index not in self._later or not operands or not alike:
            return None
        if replaced:
            waiting = [step for other, steps in self._later.items() if other != index for step in steps]
            if any(arg.kind == ADDRESS and arg.value >> 48 == index for step in waiting for arg in step.args):
                return None
            del self._later[index]
        return operands

    def settle(self, *tensors: torch.Tensor) -> None:
        """Write down what these tensors wait for."""
        for index in () if self._waits else [self.index_of(tensor) for tensor in tensors]:
            self._settle(index)

    def settle_before(self, changed: torch.Tensor) -> None:
        """Write down what waits and reads or writes a tensor that is about to be changed in place."""
        index = self.index_of(changed)
        for waiting, steps in list(self._later.items()):
            if any(arg.kind == ADDRESS and arg.value >> 48 == index for step in steps for arg in step.args):
                self._settle(waiting)

    def _settle(self, index: int) -> None:
        for step in self._later.pop(index, ()):
            operands = {arg.value >> 48 for arg in step.args if arg.kind == ADDRESS}
            for operand in operands - {index}:
                self._settle(operand)
            for operand in operands:
                self._touch(operand)
            self.steps.append(step)

    # steps

    def launched(self, compiled: Compiled, grid: tuple[int, int, int], args: Sequence[tuple[str, Any]]) -> None:
        """Write a launch down. Raises ExportError for a kernel that a plain launch cannot start."""
        pointers = [value for kind, value in args if kind.startswith("*")]
        tensors = [value if isinstance(value, torch.Tensor) else value.view() for value in pointers]
        reached = [other for tensor in tensors for other in getattr(tensor, "reaches", ())]
        if self._later and (needed := [tensor for tensor in (*tensors, *reached) if tensor.numel()]):
            self.settle(*needed)
        number = self._kernel(compiled, [kind for kind, _ in args])
        packed = tuple(self._packed(kind, value) for kind, value in args)
        self.steps.append(Step(LAUNCH, number, grid, (*packed, *_SCRATCH)))

    def _kernel(self, compiled: Compiled, types: Sequence[str]) -> int:
        known = self.kernels.get(id(compiled))
        if known is None:
            metadata = compiled.metadata
            special = [
                name
                for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
                if getattr(metadata, name, 0)
            ]
            if special or getattr(metadata, "num_ctas", 1) != 1:
                raise ExportError(f"the kernel {compiled.name} wants {', '.join(special) or 'clusters'} of a launch.")
            threads = metadata.num_warps * metadata.target.warp_size
            n_args = len(types) + len(_SCRATCH)
            known = compiled, Kernel(compiled.name, compiled.code, n_args, threads, metadata.shared)
            self.kernels[id(compiled)] = known
            self.writes.append(written_arguments(code_of(metadata), types))
        return list(self.kernels).index(id(compiled))

    def _packed(self, kind: str, value: Any) -> Arg:
        if kind.startswith("*"):
            value = value if isinstance(value, torch.Tensor) else value.view()
            if not value.numel():
                return Arg(VALUE, 8, 0)
            place = self.address(value)
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            self.extents[place] = max(self.extents.get(place, 0), (last + 1) * value.itemsize)
            return Arg(ADDRESS, 8, place)
        letter = _NUMBERS[kind]
        content = struct.pack("<" + letter, value)
        return Arg(VALUE, len(content), int.from_bytes(content, "little"))

    def fill(self, tensor: torch.Tensor, value: float | bool) -> None:
        """Write a fill of a contiguous tensor down. Raises ExportError for values that 32 bits do not repeat."""
        if tensor.numel() == 0:
            return
        one = torch.full((8 // tensor.itemsize,), value, dtype=tensor.dtype).view(torch.uint8).numpy().tobytes()
        size = tensor.numel() * tensor.itemsize
        whole = tensor.is_contiguous() and size == self.storages[self.index_of(tensor)].size
        if one[:4] != one[4:] or (size % 4 and not whole):
            raise ExportError(f"{self.where()} fills {list(tensor.shape)} {tensor.dtype} with {value}.")
        place = self.address(tensor)
        self.steps.append(Step(FILL, value=int.from_bytes(one[:4], "little"), to=place, size=-(-size // 4) * 4))

    # operations of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._lower(self, func, args, kwargs or {})

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that steps fill."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.index_of(tensor, written=True)
        return tensor

    def where(self, error: BaseException | None = None) -> str:
        """The module that is at work, and the line of it, in words. error: which came from there."""
        names = {id(module): name for name, module in self.model.named_modules()}
        line = module = ""
        for frame, number in _frames(error):
            if not line and _of_model(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{number}"
            owner = frame.f_locals.get("self")
            if not module and isinstance(owner, nn.Module):
                own = names.get(id(owner), "")
                module = f"{own or 'the model'} ({type(owner).__name__})"
            if line and module:
                break
        return f"{module or 'the model'}, {line or 'an unknown line'},"


def _frames(error: BaseException | None) -> Iterator[tuple[Any, int]]:
    """(frame, line) of the calls that are under way, or that an error came from, the innermost first."""
    if error is None:
        return traceback.walk_stack(sys._getframe(1))
    return reversed(list(traceback.walk_tb(error.__traceback__)))


@functools.lru_cache(maxsize=1024)
def _of_model(path: str) -> bool:
    """Whether a file may be a model's: not torch's, Python's or ours, but for the networks that come with us."""
    own = pathlib.Path(path)
    if own.is_relative_to(_PACKAGE):
        return own.is_relative_to(_PACKAGE / "tools") or own.is_relative_to(_PACKAGE / "commands")
    return not path.startswith(("<", *_TORCH)) and ("site-packages" in own.parts or not path.startswith(_PYTHON))
