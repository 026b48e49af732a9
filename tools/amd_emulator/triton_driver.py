"""The emulated GPU as a Triton driver."""

from __future__ import annotations

import contextlib
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .code_object import wave_size
from .isa import ARCH
from .launch import LDS_SIZE, Kernel, Ranges
from .structures import EmulatorError

COMPUTE_UNITS = 8


def lds_size(gfx: str) -> int:
    """Bytes of LDS that a workgroup may take."""
    return LDS_SIZE.get(gfx, 64 * 1024)


class _Utils:
    """What Triton asks of a driver's library."""

    def __init__(self, gfx: str) -> None:
        self.gfx = gfx

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return (name,), (name, kernel, shared), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int = 0) -> dict[str, Any]:
        return dict(
            max_shared_mem=lds_size(self.gfx),
            max_num_regs=65536,
            sm_clock_rate=1,
            multiprocessor_count=COMPUTE_UNITS,
            mem_clock_rate=1,
            mem_bus_width=1,
            arch=self.gfx,
            warpSize=wave_size(self.gfx),
        )


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _integer(kind: str, value: Any) -> int:
    """As C would convert it."""
    bits = int(kind[1:])
    if kind[0] == "i" and bits > 1:
        half = 1 << (bits - 1)
        return (int(value) + half) % (1 << bits) - half
    return int(value) % (1 << bits)


class _Arguments:
    """A launch's arguments flattened: names, (type, value), and the memory of its tensors."""

    def __init__(self) -> None:
        self.names: list[object] = []
        self.values: list[tuple[str, Any]] = []
        self.ranges: Ranges = []

    def add(self, name: str, kind: Any, value: Any) -> None:
        if isinstance(kind, (tuple, list)):
            for i, (one, part) in enumerate(zip(kind, value, strict=True)):
                self.add(f"{name}.{i}", one, part)
        elif kind.startswith("*"):
            self._add(name, kind, self._address(name, value))
        elif kind != "constexpr":
            value = value.item() if hasattr(value, "item") else value
            number = kind[0] in "iu" and not isinstance(value, bool)
            self._add(name, kind, _integer(kind, value) if number else value)

    def _add(self, name: str, kind: str, value: Any) -> None:
        self.names.append(name)
        self.values.append((kind, value))

    def _address(self, name: str, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise EmulatorError(f"argument {name} lies on {value.device}; expected a CPU tensor")
            self.ranges.append(_storage(value))
            # What the addresses among its values lead to.
            self.ranges += map(_storage, getattr(value, "reaches", ()))
        if value is None:
            return 0
        return value.data_ptr() if hasattr(value, "data_ptr") else int(value)


_one_at_a_time = threading.Lock()  # whichever thread launches: code is decoded as it is met


class _Launcher:
    """Triton's launcher of one compiled kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature, self.metadata = dict(src.signature), metadata
        self.kernel: Kernel | None = None
        self.names = [n if isinstance(n, str) else src.fn.arg_names[n[0]] for n in self.signature]

    def __call__(
        self,
        gx: int,
        gy: int,
        gz: int,
        stream: int,
        function: Any,
        packed: Any,
        launch: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        if gx * gy * gz == 0:
            return
        with _one_at_a_time:
            self._run((gx, gy, gz), function, args)

    def _run(self, grid: tuple[int, int, int], function: Any, args: tuple[Any, ...]) -> None:
        name, hsaco, shared = function
        metadata = self.metadata
        if self.kernel is None:
            self.kernel = Kernel(hsaco, name, metadata.target.arch, shared, metadata.num_warps)
        given = _Arguments()
        for one, kind, value in zip(self.names, self.signature.values(), args, strict=False):
            given.add(one, kind, value)
        each = getattr(metadata, "global_scratch_size", 0)
        scratch = torch.zeros(each * math.prod(grid) + 256 if each else 0, dtype=torch.uint8)
        given.ranges.append(_storage(scratch))
        given.add("global_scratch", "*g", scratch if each else None)
        given.add("profile_scratch", "*p", None)
        self.kernel.launch(grid, given.values, given.ranges, given.names)
        last.kernel, last.metadata = self.kernel, metadata


last = types.SimpleNamespace(kernel=None, metadata=None)  # what was launched last


class Driver:
    """What `triton.runtime.driver.active` needs, for one emulated architecture."""

    launcher_cls = _Launcher

    def __init__(self, gfx: str) -> None:
        if gfx not in ARCH:
            raise EmulatorError(f"architecture {gfx!r}; expected one of {', '.join(ARCH)}")
        self.gfx, self.utils, self.device = gfx, _Utils(gfx), 1000 + list(ARCH).index(gfx)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self.gfx, wave_size(self.gfx))

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return int(self.gfx[3:-2]), 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def once(call: Callable[[], object], quantiles: Any = None, **_: Any) -> list[float]:
            call()
            return [0.0] * len(quantiles or [0])

        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass

    def is_active(self) -> bool:
        return True


class _Patches:
    """Attributes set for a while."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def undo(self) -> None:
        for one in reversed(self._undo):
            one()


def _choose_config(config: Any) -> Callable[..., Any]:
    """A replacement of `Autotuner.run` that runs one of its configs."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs) if self.early_config_prune else self.configs
        by_index = not callable(config)
        chosen = configs[min(config, len(configs) - 1)] if by_index else config(configs)
        self.best_config = chosen
        full = {**self.nargs, **kwargs, **chosen.all_kwargs()}
        if chosen.pre_hook:
            chosen.pre_hook(full)
        self.pre_hook(full)
        result = self.fn.run(*args, **kwargs, **chosen.all_kwargs())
        self.post_hook(full, exception=None)
        self.nargs = None
        return result

    return run


def _pretend_gpu(patches: _Patches, gfx: str) -> None:
    """torch says that a GPU is there."""
    properties = types.SimpleNamespace(
        name=f"emulated {gfx}",
        multi_processor_count=COMPUTE_UNITS,
        gcnArchName=gfx,
        major=int(gfx[3:-2]),
        minor=0,
        total_memory=16 << 30,
        warp_size=wave_size(gfx),
    )
    answers = dict(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
        get_device_name=lambda *_: properties.name,
        get_device_properties=lambda *_: properties,
        get_device_capability=lambda *_: (properties.major, 0),
        device=lambda *_: contextlib.nullcontext(),
    )
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.version, "hip", "6.4")
    patches.set(torch.Tensor, "is_cuda", property(lambda tensor: True))


@contextlib.contextmanager
def patch_triton(
    gfx: str,
    config: Any = 0,
    options: dict[str, Any] | None = None,
    fake_cuda: bool = False,
    buffer_ops: bool | None = None,
) -> Iterator[Driver]:
    """Inside, launches of `@triton.jit` functions on CPU tensors run on an emulated `gfx`.

    config: which config of `triton.autotune` runs: an index, a function of the configs, or None to
    let the autotuner run them all and keep the first.  options: of every launch, e.g.
    dict(num_warps=2).  fake_cuda: torch.cuda and Tensor.is_cuda say that a GPU is there.
    buffer_ops: have Triton convert to buffer operations, or not (None: as its knob says).
    """
    import triton
    from triton.runtime import autotuner, driver, jit

    device, patches, before = Driver(gfx), _Patches(), dict(vars(driver))
    if buffer_ops is not None:
        knob = triton.knobs.amd.use_buffer_ops
        device.device += 100 * (1 + bool(buffer_ops))  # kernels are cached by device
    if config is not None:
        patches.set(autotuner.Autotuner, "run", _choose_config(config))
    if options:
        run = jit.JITFunction.run
        patches.set(jit.JITFunction, "run", lambda self, *a, **k: run(self, *a, **{**k, **options}))
    if fake_cuda:
        _pretend_gpu(patches, gfx)
    driver.set_active(device)
    try:
        if buffer_ops is not None:
            triton.knobs.amd.use_buffer_ops = buffer_ops
        yield device
    finally:
        if buffer_ops is not None:
            triton.knobs.amd.use_buffer_ops = knob
        vars(driver).update(before)  # other names up to Triton 3.4
        patches.undo()


def run_jit(
    fn: Any,
    grid: Any,
    *args: Any,
    arch: str,
    num_warps: int = 4,
    num_stages: int = 2,
    buffer_ops: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Launch `fn[grid](*args, **kwargs)` on an emulated `arch`; Triton's compiled kernel.

    args: in the order of the signature; constexprs and compile options as keywords.
    """
    with patch_triton(arch, buffer_ops=buffer_ops):
        tuned = hasattr(fn, "configs")
        options = {} if tuned else dict(num_warps=num_warps, num_stages=num_stages)
        return fn[grid](*args, **options, **kwargs)
