"""What differs between releases of Triton, asked once: the one file that compares versions.

Triton 3.0 (torch 2.4) to the newest. Each answer says which release it is about.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from . import target as targets
from .native_launch import native_launcher

# (call, arguments before the grid, arguments between the stream and the kernel's own)
Entry = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]

VERSION = targets.triton_version() or (0,)
# Triton 3.3 began to pass constexpr arguments to the compiled launcher as well.
PASS_CONSTEXPRS = VERSION >= (3, 3)
# `triton.knobs` came with Triton 3.4; before, switches were environment variables and attributes.
_KNOBS = getattr(triton, "knobs", None)
_RUNTIME = getattr(_KNOBS, "runtime", None)


# Whose `launch_enter_hook` says that somebody (a profiler) wants to hear of launches.
HOOKS: Any = triton.compiler.CompiledKernel if _RUNTIME is None else _RUNTIME


_loading = threading.RLock()


class _Separate:
    """Triton's loading of a module, one at a time and each into an object of its own."""

    def __init__(self, load: Callable[[str, str], types.ModuleType]) -> None:
        self.load = load

    def __call__(self, name: str, path: str) -> types.ModuleType:
        module = types.ModuleType(name)
        with _loading:
            module.__dict__.update(self.load(name, path).__dict__)
        return module


def load_separately(build: Any) -> bool:
    """Let launchers be loaded by several threads at once; whether `build`, Triton's module that
    loads them, has the place for it.

    Triton up to 3.7 compiles a C module per signature and loads all of them under one name. CPython
    keeps one module object per name for such modules: where a second kernel of a signature is
    loaded, the object that another thread has just been given is filled with that one's function,
    and a kernel ends up with the launcher of another. Here every load gets an object of its own.
    """
    load = getattr(build, "_load_module_from_path", None)  # from 3.4 on
    if load is not None and not isinstance(load, _Separate):
        build._load_module_from_path = _Separate(load)
    return load is not None


_SEPARATE = load_separately(importlib.import_module("triton.runtime.build"))


def loading() -> contextlib.AbstractContextManager[Any]:
    """Around whatever may load a launcher."""
    return contextlib.nullcontext() if _SEPARATE else _loading


def launcher_of(compiled: Any) -> Entry:
    """How to run a compiled kernel again."""
    with loading():
        run = compiled.run
    direct = native_launcher(compiled, run) if PASS_CONSTEXPRS else None
    if direct is not None:
        return direct, (), ()
    between = (compiled.function, compiled.packed_metadata, None, None, None)
    # Triton's launcher object only fetches scratch memory; kernels without any skip it. Its inner
    # signature belongs to one release.
    if VERSION[:2] != (3, 6) or getattr(run, "profile_scratch_size", True):
        return run, (), between
    function, metadata = between[:2]
    if type(run).__name__ == "CudaLauncher" and not run.global_scratch_size:
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (), (function, *flags, metadata, None, None, None)
    if type(run).__name__ == "HIPLauncher":
        prefix = (run.launch_cooperative_grid,)
        return run.launch, prefix, (function, None, metadata, None, None, None)
    return run, (), between


def prepare() -> None:
    """Have Triton build its driver, and hash its own files, which every compilation asks for.
    The process remembers both."""
    with contextlib.suppress(Exception):  # said again where it is wanted
        _ = triton.runtime.driver.active.utils
    hash_files()


def hash_files() -> None:
    """Have Triton hash its own files. The function has moved between releases; one that does
    without is left alone."""
    for module in ("triton.compiler.compiler", "triton.runtime.cache"):
        key = getattr(importlib.import_module(module), "triton_key", None)
        if key is not None:
            with contextlib.suppress(Exception):  # said again where it is wanted
                key()
            return


def end_pool(device: int, pool: tuple[int, int]) -> None:
    """Have torch's allocator end what a capture into `pool` began. torch 2.4 has another name."""
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    end(device, pool)


def name_constexprs(fn: Any) -> None:
    """Triton 3.0's interpreter knows constexprs by their annotation, and only by the class itself;
    under `from __future__ import annotations` it finds a string."""
    if VERSION < (3, 1) and targets.interpreted():
        raw = fn.fn
        raw.__annotations__ = {
            name: triton.language.constexpr if annotation == "tl.constexpr" else annotation
            for name, annotation in raw.__annotations__.items()
        }


def _mend_interpreter() -> None:
    """Up to Triton 3.6 the interpreter takes arrays of one element as bounds of loops, which NumPy
    2.4 no longer turns into integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


if VERSION < (3, 7) and targets.interpreted():
    _mend_interpreter()


_switching = threading.RLock()


@contextlib.contextmanager
def without_buffer_operations() -> Iterator[None]:
    """Kernels that are compiled inside for AMD use no buffer operations.

    For the whole process: what other threads compile meanwhile goes without them, too, which costs
    some speed and changes no result.
    """
    with _switching:
        knobs = getattr(_KNOBS, "amd", None)
        if knobs is not None:
            with knobs.scope():
                knobs.use_buffer_ops = False
                yield
            return
        name = "AMDGCN_USE_BUFFER_OPS"
        previous = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            if previous is None:
                del os.environ[name]
            else:
                os.environ[name] = previous


def triton_cache() -> pathlib.Path:
    """Where Triton keeps compiled kernels."""
    folder = getattr(getattr(_KNOBS, "cache", None), "dir", None)
    folder = folder or os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    return pathlib.Path(folder).expanduser()


LOCKS = "sparse_bridge_locks"  # a folder of ours in Triton's disk cache


def cache_is_empty() -> bool:
    """Whether Triton's disk cache has no kernel at all."""
    folder = triton_cache()
    with contextlib.suppress(OSError):  # said again where it is wanted
        return not folder.is_dir() or not any(path.name != LOCKS for path in folder.iterdir())
    return False


def bind_to_device(fn: Any) -> None:
    """Have a jit function look at the current device, as its first launch does (from 3.3 on)."""
    caches = getattr(fn, "device_caches", None)
    if caches is not None:
        _ = caches[triton.runtime.driver.active.get_current_device()]


def settle_key(fn: Any) -> None:
    """Have the key of a jit function made after those of the functions that it calls.

    In Triton 3.5 to 3.7 the key names the global constants of those that have theirs by then. So it
    depended on what a process compiled before: another process did not find what was compiled.
    """
    function: Any = getattr(fn, "fn", None)
    if getattr(fn, "hash", None) is not None or not hasattr(function, "__code__"):
        return
    for name in function.__code__.co_names:
        for space in (function.__globals__, vars(triton.language)):
            called = space.get(name)
            if called is not fn and isinstance(called, triton.runtime.JITFunction):
                settle_key(called)
    _ = fn.cache_key


def load_no_launchers() -> None:
    """Launchers are built by this process and loaded by others (from 3.4 on; before, by both)."""
    build: Any = importlib.import_module("triton.runtime.build")
    if hasattr(build, "_load_module_from_path"):
        build._load_module_from_path = lambda name, path: types.SimpleNamespace(launch=None)


def source_of(fn: Any, fields: dict[str, Any]) -> Any:
    """A form, as Triton's `compile` takes it.

    fields: of its `ASTSource`, but for `fn`.
    """
    src = object.__new__(triton.compiler.ASTSource)
    vars(src).update(fields, fn=fn)
    return src


def fill_disk_cache(src: Any, target: Any, options: dict[str, Any]) -> None:
    """Compile a form that another process needs; no GPU is asked."""
    kernel = triton.compile(src, target=target, options=options)
    for backend in triton.backends.backends.values():
        if backend.compiler.supports_target(target):
            driver = importlib.import_module(backend.driver.__module__)
            # Up to 3.7 each signature has a launcher, a module in C.
            if hasattr(driver, "make_launcher"):
                launcher = next(member for name, member in vars(driver).items() if name.endswith("Launcher"))
                # The program builds it again, and raises.
                with contextlib.suppress(Exception):
                    launcher(src, kernel.metadata)
