"""Packages on the emulator of gfx942, and what Python's layers compute there."""

from __future__ import annotations

import ctypes
import os
import subprocess

import torch

from sparse_bridge.core.device import selection
from sparse_bridge.export import load_package, package_scenes
from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.entry import flattened
from sparse_bridge.export.player.library import TensorInfo, call
from sparse_bridge.export.player.record import record
from sparse_bridge.native.build import compiler

from .fake_gpu import Emulator

ARCH, ROWS = "gfx942", 320


def packaged(path, model, example, rows=ROWS):
    program = record(model, example, rows, f"hip:{ARCH}")
    package_file.write(path, [program])
    return program


def expected(model, *inputs):
    """By Python's layers on the emulator."""
    import amd_emulator

    with torch.no_grad(), amd_emulator.patch_triton(ARCH), selection.standing_in("emulated"):
        return package_scenes.tensors_of(flattened(model(*inputs)))


class Played:
    """A package on the emulator."""

    def __init__(self, gpu, path, program, graph=False, accesses=None):
        """accesses: of each step, beyond which launches must not go."""
        self.gpu, self.program = gpu, program
        self.package = load_package(path, graph=graph)
        self.emulator = Emulator(program, block=self.block(), accesses=accesses)
        gpu.listen(self.emulator)

    def __call__(self, features, coords):
        result = self.package(coords, features)
        if self.gpu.error is not None:
            raise self.gpu.error
        return result

    def block(self):
        """The address of its memory."""
        info = TensorInfo()
        call("input", self.package._instance, 0, ctypes.byref(info))
        return info.data - self.program.inputs[0].at

    def poison(self):
        """Leave NaN wherever a run has to write before it reads."""
        keep = [(it.at, len(it.data)) for it in self.program.constants]
        coords = self.program.inputs[0]
        keep.append((coords.at, 16 * self.program.rows))
        at = 0
        for start, size in sorted([*keep, (self.program.block, 0)]):
            if start > at:
                ctypes.memset(self.block() + at, 0xFF, start - at)
            at = max(at, start + size)

    def unchanged(self):
        """Whether constants are as they were sent, but for addresses among them."""
        moved = {at for at, _ in self.program.relocations}
        for constant in self.program.constants:
            now = ctypes.string_at(self.block() + constant.at, len(constant.data))
            for at in range(0, len(now), 8):
                if constant.at + at not in moved and now[at : at + 8] != constant.data[at : at + 8]:
                    return False
        return True

    def close(self):
        self.gpu.listen()
        self.package.close()


class Example:
    """The example of a folder, as a library here, so that its launches reach the emulator."""

    def __init__(self, gpu, folder, build):
        self.gpu, self.folder, library = gpu, folder, build / "example.so"
        sources = [str(folder / name) for name in ("example.c", "sparse_bridge_rt.c")]
        words = [*(compiler() or ["cc"]), "-std=c99", "-O1", "-shared", "-fPIC", "-Dmain=played", *sources]
        subprocess.run([*words, "-ldl", "-lm", "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))

    def __call__(self, *options):
        """The exit status of the program."""
        words = [b"run_package", os.fsencode(self.folder), *options]
        self.gpu.listen(Emulator(package_file.read((self.folder / "model.sbp").read_bytes())[0]))
        status = self.library.played(len(words), (ctypes.c_char_p * len(words))(*words))
        ctypes.CDLL(None).fflush(None)  # C buffers its lines where no terminal listens
        return status
