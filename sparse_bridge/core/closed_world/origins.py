"""Whose code a function is: torch's and the frameworks', a library's, or the program's own."""

from __future__ import annotations

import enum
import functools
import sys
from types import CodeType
from typing import Any

from ...names import add_frameworks, is_framework
from ...refusals import Why


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Origin(enum.Enum):
    """Trusted code keeps nothing that a replay would miss. A library does what its functions are for, as
    the clock does. The program's code is looked into."""

    TRUSTED = enum.auto()
    LIBRARY = enum.auto()
    PROGRAM = enum.auto()


_PACKAGE = __name__.partition(".")[0]
_PROGRAMS = (f"{_PACKAGE}.tools",)  # networks of the package that are as a program's
_TRUSTED = frozenset({_PACKAGE, "torch", "torchvision", "triton", "numpy", "einops", "typing_extensions"})
_PURE = words(
    "abc bisect cmath collections contextlib copy copyreg dataclasses enum fractions functools heapq "
    "itertools keyword math numbers operator re sre_compile sre_parse statistics string types typing weakref "
    "_collections_abc _weakrefset _operator _functools _bisect _heapq _collections builtins"
)
_IMPURE = (
    "numpy.random",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.quasirandom",
    "torch.multiprocessing",
)


@functools.lru_cache(maxsize=4096)
def of_module(name: str) -> Origin:
    """Of a module, by its name."""
    root = name.partition(".")[0]
    if name.startswith(_PROGRAMS):
        return Origin.PROGRAM
    if name.startswith(_IMPURE):
        return Origin.LIBRARY
    if root in _TRUSTED or is_framework(root) or root in _PURE or root.startswith("namedtuple_"):
        return Origin.TRUSTED
    return Origin.LIBRARY if root in sys.stdlib_module_names else Origin.PROGRAM


def trust(packages: tuple[str, ...]) -> None:
    """Take the code of these packages, which belong to a framework, for trusted."""
    add_frameworks(packages)
    of_module.cache_clear()


def of_globals(names: dict[str, Any]) -> Origin:
    """Of code, by the module that it is in."""
    name = names.get("__name__")
    return of_module(name) if isinstance(name, str) else Origin.PROGRAM


def of_class(cls: type) -> Origin:
    """Of a class, by the module that it is in."""
    name = getattr(cls, "__module__", None)
    return of_module(name) if isinstance(name, str) else Origin.PROGRAM


def is_generated(code: CodeType) -> bool:
    """Whether a decorator of the standard library wrote the code, as for dataclasses."""
    return code.co_filename == "<string>" and code.co_name.startswith("__")


MUTATING = words(
    "append extend insert remove pop popitem clear update setdefault add discard sort reverse appendleft popleft "
    "extendleft rotate move_to_end intersection_update difference_update symmetric_difference_update __setitem__ "
    "__delitem__ __setattr__ __delattr__ __setstate__"
)
_BUILTINS = words(
    "abs all any ascii bin callable chr delattr dir divmod format getattr hasattr hash hex isinstance issubclass "
    "iter len max min next oct ord pow repr round setattr sorted sum vars __build_class__ locals"
)
_METHODS_OF = (str, bytes, int, float, complex, bool, list, tuple, dict, set, frozenset, range, slice, type(None))
_HOST_READS = frozenset({"item", "tolist", "numpy", "cpu", "__array__", "nonzero", "is_nonzero", "equal", "allclose"})
# Functions of torch that change or read what is no tensor.
EFFECTS = words(
    "manual_seed seed set_rng_state get_rng_state initial_seed set_default_dtype set_default_device "
    "set_default_tensor_type use_deterministic_algorithms set_num_threads set_printoptions "
    "set_float32_matmul_precision set_warn_always "
    "save load synchronize memory_allocated max_memory_allocated memory_stats memory_reserved mem_get_info empty_cache "
    "record "
    "elapsed_time query register_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_post_accumulate_grad_hook backward register_buffer register_parameter add_module register_module "
    "zero_grad from_file get_num_threads get_default_device is_warn_always_enabled reset_peak_memory_stats "
    "set_detect_anomaly share_memory_ retain_grad all_gather_object broadcast_object_list"
)


# Functions of numpy that read or write files, or what holds for the process.
FILES = words(
    "load save savez savez_compressed loadtxt savetxt genfromtxt fromregex fromfile tofile geterr seterr "
    "set_printoptions get_printoptions"
)
# Functions that change what they are given.
_CHANGES = words(
    "heappush heappop heapify heapreplace heappushpop insort insort_left insort_right setitem delitem iadd"
)


def effect_of(function: Any) -> Why | None:
    """What a function written in C, as a profiler is shown it, does that a replay would not repeat: GRAPH_WRITES_STATE
    where it changes what it is a method of, GRAPH_HOST_READ, GRAPH_SIDE_EFFECT; None: nothing."""
    import torch  # here: `trust` is called before anything needs torch

    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)

    if isinstance(owner, torch.Tensor):
        return _of_torch(name)
    if isinstance(owner, type(sys)):
        return _of_module_function(owner.__name__, name)
    if owner is None or isinstance(owner, type):
        module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or "builtins"
        return _of_module_function(module, name)
    collection = isinstance(owner, _METHODS_OF) or type(owner).__module__ in ("collections", "_collections", "builtins")
    if collection or name == "__setattr__":
        return Why.GRAPH_WRITES_STATE if name in MUTATING else None
    files = type(owner).__module__ == "numpy" and name in FILES
    trusted = of_class(type(owner)) is Origin.TRUSTED and not (files or isinstance(owner, torch.Generator))
    return None if trusted or type(owner).__module__.startswith("pybind11") else Why.GRAPH_SIDE_EFFECT


def _of_module_function(module: str, name: str) -> Why | None:
    if module == "builtins":
        return None if name in _BUILTINS else Why.GRAPH_SIDE_EFFECT
    changes = name in _CHANGES or (module.partition(".")[0] == "numpy" and name in FILES)
    if module.partition(".")[0] == "torch" and not changes:
        return _of_torch(name)
    return Why.GRAPH_SIDE_EFFECT if changes or of_module(module) is not Origin.TRUSTED else None


def _of_torch(name: str) -> Why | None:
    return Why.GRAPH_HOST_READ if name in _HOST_READS else Why.GRAPH_SIDE_EFFECT if name in EFFECTS else None
