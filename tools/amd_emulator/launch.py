"""Launches: waves are set up as the hardware would, workgroups take turns on the native core."""

from __future__ import annotations

import ctypes
import random
import struct
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from . import native
from .code_object import SCALARS, CodeObject, wave_size
from .isa import ARCH
from .structures import EmulatorError, MemoryFault, State, Unsupported, stats

Ranges = list[tuple[int, int]]
LDS_SIZE = {"gfx950": 160 * 1024}  # 64 KiB elsewhere
# check: bounds of global memory.  quantum: instructions of a turn.  resident: workgroups alive at
# once.  seed: shuffled orders and turns of random length, to expose races.  poison: what registers,
# LDS and scratch hold at first.  ranges: further addresses that kernels may reach.  trace: print
# launches.
cfg = types.SimpleNamespace(
    check=True, quantum=2000, resident=2, seed=None, max_steps=2_000_000_000, poison=0x7FC0DEAD, ranges=[], trace=False
)
_MORE, _DONE, _BARRIER, _DECODE, _FAULT = range(5)  # what a wave's turn ended with
_FORMATS = dict(
    i1="<B",
    u1="<B",
    i8="<b",
    u8="<B",
    i16="<h",
    u16="<H",
    i32="<i",
    u32="<I",
    i64="<q",
    u64="<Q",
    fp16="<e",
    fp32="<f",
    f32="<f",
    fp64="<d",
)
# Places in a wave's scalars, see alu.h.
_TTMP, _EXEC, _PC = 108, 126, 256


def _pack(kind: str, value: Any) -> bytes:
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack("<Q" if kind[0] == "*" else _FORMATS[kind], value)


def _argument_block(args: Sequence[tuple[str, Any]], grid: Sequence[int], threads: int) -> bytes:
    """Arguments, each aligned to its size; then the hidden ones of code object version 5: numbers
    of blocks, sizes of groups, remainders, ..., dimensions of the grid."""
    block = b""
    for kind, value in args:
        packed = _pack(kind, value)
        block += b"\0" * (-len(block) % len(packed)) + packed
    block += b"\0" * (-len(block) % 8)
    block += struct.pack("<3I6H", *grid, threads, 1, 1, 0, 0, 0).ljust(64, b"\0")
    return block + struct.pack("<H", 3)


class _Wave:
    """Registers of a wave and where it is."""

    def __init__(self, launch: _Launch, lds: int) -> None:
        kernel, size = launch.kernel, launch.wave
        private = max(kernel.code.private, 4)
        self.scalars = (ctypes.c_uint32 * SCALARS)()
        self.vectors = ctypes.create_string_buffer(256 * size * 4)
        self.accumulators = ctypes.create_string_buffer(256 * size * 4 if size == 64 else 4)
        self.scratch = ctypes.create_string_buffer(private * size)
        self.status = _MORE
        # Denormals of fp32 are flushed only if the kernel says so.
        flush = 0 if kernel.code.rsrc1 >> 16 & 3 == 3 else 0x8040
        ieee = kernel.code.rsrc1 >> 23 & 1 if ARCH[kernel.code.gfx] != "rdna4" else 0
        self.state = State(
            s=ctypes.addressof(self.scalars),
            v=ctypes.addressof(self.vectors),
            acc=ctypes.addressof(self.accumulators),
            lds=lds,
            scr=ctypes.addressof(self.scratch),
            lds_size=launch.lds_size,
            scr_stride=private,
            wave=size,
            mxcsr=0x1F80 | flush,
            nrange=len(launch.reach) // 2,
            range=ctypes.addressof(launch.reach),
            mex=0,
            ieee=ieee,
        )

    def start(self, launch: _Launch, group: tuple[int, int, int], number: int) -> None:
        """Wave `number` of a workgroup, at the kernel's first instruction."""
        code, size, scalars = launch.kernel.code, launch.wave, self.scalars
        user, at = launch.user_scalars, len(launch.user_scalars)
        scalars[:] = code.scalars
        scalars[:at] = user
        if ARCH[code.gfx] == "rdna4":
            scalars[_TTMP + 9] = group[0]
            scalars[_TTMP + 7] = group[1] | group[2] << 16
            scalars[_TTMP + 8] = number << 25
        else:
            for bit, place in zip((7, 8, 9), group, strict=True):
                if code.rsrc2 >> bit & 1:
                    scalars[at] = place
                    at += 1
        scalars[_EXEC], scalars[_EXEC + 1] = 0xFFFFFFFF, 0xFFFFFFFF if size == 64 else 0
        scalars[_PC], scalars[_PC + 1] = code.entry & 0xFFFFFFFF, code.entry >> 32
        ctypes.memmove(self.vectors, launch.poison, 256 * size * 4)
        lanes = (ctypes.c_uint32 * size)(*range(number * size, (number + 1) * size))
        ctypes.memmove(self.vectors, lanes, 4 * size)
        if size == 64:
            ctypes.memmove(self.accumulators, launch.poison, 256 * size * 4)
        ctypes.memset(self.scratch, cfg.poison & 0xFF, len(self.scratch))
        self.status, self.state.steps = _MORE, 0

    @property
    def pc(self) -> int:
        return self.scalars[_PC] | self.scalars[_PC + 1] << 32


class _Group:
    """A workgroup: its LDS and its waves."""

    def __init__(self, launch: _Launch) -> None:
        self.lds = ctypes.create_string_buffer(launch.lds_size + 16)
        place = ctypes.addressof(self.lds)
        self.waves = [_Wave(launch, place) for _ in range(launch.kernel.num_warps)]

    def start(self, launch: _Launch, place: tuple[int, int, int]) -> None:
        self.place = place
        ctypes.memset(self.lds, cfg.poison & 0xFF, launch.lds_size)
        for number, wave in enumerate(self.waves):
            wave.start(launch, place, number)

    def done(self) -> bool:
        return all(wave.status == _DONE for wave in self.waves)

    def pass_barrier(self) -> None:
        """If every wave waits or has ended, those that wait go on."""
        if any(wave.status == _MORE for wave in self.waves):
            return
        for wave in self.waves:
            if wave.status == _BARRIER:
                wave.status = _MORE


class _Launch:
    """One launch of a kernel."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        args: Sequence[tuple[str, Any]],
        ranges: Ranges | None,
        names: Sequence[object],
    ) -> None:
        self.kernel, self.grid, self.args, self.names = kernel, grid, args, names
        self.wave = wave_size(kernel.code.gfx)
        threads = self.wave * kernel.num_warps
        self.lds_size = max(kernel.shared, kernel.code.lds, 4)
        block = _argument_block(args, grid, threads)
        block = block.ljust(max(kernel.code.arguments, len(block)) + 256, b"\0")
        self._block = ctypes.create_string_buffer(block, len(block))
        sizes = [n * m for n, m in zip(grid, (threads, 1, 1), strict=True)]
        packet = struct.pack("<HHHHHHIII", 0, 0, threads, 1, 1, 0, *sizes).ljust(64, b"\0")
        self._packet = ctypes.create_string_buffer(packet, 64)
        self.user_scalars = self._user_scalars()
        self.reach = self._reach(ranges)
        words = 256 * self.wave
        self.poison = ctypes.create_string_buffer(struct.pack("<I", cfg.poison) * words, 4 * words)

    def _user_scalars(self) -> list[int]:
        """What the descriptor wants in the first scalar registers."""
        code = self.kernel.code
        # Word 3 of the private segment's buffer marks it for core.c.
        user = [0, 0, 0, 0x00E5C0DE] if code.properties & 1 else []
        packet, block = ctypes.addressof(self._packet), ctypes.addressof(self._block)
        for bit, value in ((2, packet), (4, 0), (8, block), (16, 0), (32, 0)):
            if code.properties & bit:
                user += [value & 0xFFFFFFFF, value >> 32]
        if code.properties & 64:
            user += [code.private]
        n_user = code.rsrc2 >> 1 & 0x1F
        return (user + [0] * 32)[: max(n_user, len(user))]

    def _reach(self, ranges: Ranges | None) -> Any:
        """Addresses that the kernel may reach, the largest ranges first."""
        block, packet = ctypes.addressof(self._block), ctypes.addressof(self._packet)
        own = [self.kernel.code.range, (block, block + len(self._block)), (packet, packet + 64)]
        if ranges is None or not cfg.check:
            given = [(4096, 1 << 62)]
        else:
            # 16-bit atomics are aligned 32-bit accesses, which may reach two bytes further.
            given = [(low & ~3, (high + 3) & ~3) for low, high in ranges]
        given = sorted(given + list(cfg.ranges), key=lambda one: one[0] - one[1])
        bounds = [bound for one in given + own for bound in one]
        return (ctypes.c_uint64 * len(bounds))(*bounds)

    def run(self) -> int:
        """All workgroups, `cfg.resident` at a time; how many instructions that took."""
        order = list(_places(self.grid))
        rnd = random.Random(cfg.seed) if cfg.seed is not None else None
        if rnd:
            rnd.shuffle(order)
        waiting, left, steps = iter(order), len(order), 0
        active: list[_Group] = []
        idle: list[_Group] = []
        while left:
            while len(active) < cfg.resident and (place := next(waiting, None)) is not None:
                active.append(idle.pop() if idle else _Group(self))
                active[-1].start(self, place)
            if rnd:
                rnd.shuffle(active)
            for group in list(active):
                steps += self._turn(group, rnd)
                if group.done():
                    active.remove(group)
                    idle.append(group)
                    left -= 1
                else:
                    group.pass_barrier()
            if steps > cfg.max_steps:
                raise EmulatorError(f"{self.kernel.code.name}: more than {cfg.max_steps} instructions (cfg.max_steps)")
        return steps

    def _turn(self, group: _Group, rnd: random.Random | None) -> int:
        """A turn of every wave that can go on; instructions that ran."""
        steps, code, count = 0, self.kernel.code, len(group.waves)
        for number in rnd.sample(range(count), count) if rnd else range(count):
            wave = group.waves[number]
            if wave.status != _MORE:
                continue
            turn = rnd.randint(1, 2 * cfg.quantum) if rnd else cfg.quantum
            place, table = ctypes.addressof(wave.state), ctypes.addressof(code.table)
            while True:
                before = wave.state.steps
                status = native.core().run(place, table, code.code, code.words, turn)
                turn -= wave.state.steps - before
                if status != _DECODE:
                    break
                code.decode(wave.pc)
                turn = max(turn, 1)
            if status == _FAULT:
                self._fault(wave, group.place, number)
            wave.status = status
            steps += wave.state.steps
            wave.state.steps = 0
        return steps

    def _fault(self, wave: _Wave, group: tuple[int, int, int], number: int) -> None:
        code, state, pc = self.kernel.code, wave.state, wave.pc
        where = (
            f"{code.gfx} kernel {code.name}, workgroup {group}, wave {number}, lane "
            f"{state.err_lane}, pc +{pc - code.entry:#x}: {code.text(pc)}"
        )
        if state.err_lane == -9:
            raise EmulatorError(f"jump outside the code object: {where}")
        if state.err_lane == -8:
            raise Unsupported(f"DPP control: {where}")
        if state.err_bytes < 0:
            raise MemoryFault(
                f"LDS/scratch access of {-state.err_bytes} bytes at offset {state.err_addr} "
                f"(LDS {state.lds_size}, scratch {state.scr_stride}): {where}"
            )
        near = [
            (abs(state.err_addr - value), f"argument {name} {state.err_addr - value:+d} bytes from its start")
            for name, (kind, value) in zip(self.names, self.args, strict=False)
            if kind[0] == "*" and value
        ]
        raise MemoryFault(
            f"out-of-bounds global access of {state.err_bytes} bytes at {state.err_addr:#x} "
            f"(nearest: {min(near)[1] if near else 'none'}): {where}"
        )


def _places(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                yield x, y, z


class Kernel:
    """A compiled kernel that can be launched. shared: bytes of LDS.  num_warps: waves."""

    def __init__(self, hsaco: bytes, name: str, gfx: str, shared: int, num_warps: int) -> None:
        self.code = CodeObject(hsaco, name, gfx)
        self.shared, self.num_warps = shared, num_warps

    def launch(
        self,
        grid: tuple[int, int, int],
        args: Sequence[tuple[str, Any]],
        ranges: Ranges | None = None,
        names: Sequence[object] | None = None,
    ) -> None:
        """Run it to the end.

        args: (type, value) in the kernel's order, types as in a Triton signature ("*..." for
        pointers).  ranges: addresses that it may reach; None: any.  names: of the arguments.
        """
        begin = time.time()
        steps = _Launch(self, grid, args, ranges, names or range(len(args))).run()
        took = time.time() - begin
        stats.steps += steps
        stats.seconds += took
        stats.launches += 1
        if cfg.trace:
            print(
                f"[{self.code.gfx}] {self.code.name} grid={tuple(grid)} warps={self.num_warps} "
                f"instructions={steps} {took:.2f}s",
                flush=True,
            )
