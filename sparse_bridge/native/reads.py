"""What the compiled helper reads of Python: the one list of it, by owner.

The header of the C files is made of this list (`header`), so what is not here does not compile. When the helper is
handed its objects, the list is compared with the classes (`handed`): a name that was changed in Python alone makes a
refusal that says so.
"""

from __future__ import annotations

import dis
import importlib
import sys
import types
from typing import Any, NamedTuple

from ..refusals import Refusal, Why

_PACKAGE = __package__.rpartition(".")[0]
_NOTHING = object()


class Owner(NamedTuple):
    """A class, an object or a module, under the name that it has in C.

    where: "module:name", or "module", of which C reads the dictionary; those of this package start with a dot. "" where
    no import leads to it, since calls bring it.  handed: C has the object itself, as `g_OWNER`.  slots: read and
    written in place, `SLOT` and `PUT`.  names: asked by name, `s_OWNER_NAME` and `GET`; one that ends in "?" is not
    there on every machine.  fields: of a named tuple, all of them in order; `FIELD`.
    """

    where: str
    handed: bool = False
    slots: str = ""
    names: str = ""
    fields: str = ""


def _handed(where: str, slots: str = "", names: str = "", fields: str = "") -> Owner:
    return Owner(where, True, slots, names, fields)


def _asked(where: str, names: str = "", fields: str = "") -> Owner:
    return Owner(where, False, "", names, fields)


_CONV, _GEMM, _RUNTIME = ".core.conv", ".kernels.gemm", ".kernels.runtime"

OWNERS = {
    # Layers in inference.
    "History": _handed(f"{_CONV}.history:History", "alone disabled full_plan plan seen"),
    "LayerCall": _handed(
        f"{_CONV}.history:LayerCall", "between changes device dtype fused history launched operands shape stream target"
    ),
    "DeferredConv": _handed(
        f"{_CONV}.deferred.conv:DeferredConv", "_count _used _version call epilogue fallback result steps"
    ),
    "FusedPlan": _handed(f"{_CONV}.fused_plan:FusedPlan", "native"),
    "UnlaunchedFeatures": _handed(f"{_CONV}.deferred.features:UnlaunchedFeatures", names="conv"),
    "Epilogue": _asked(f"{_CONV}.epilogue:Epilogue", "_make _replace bias", "bias activation alpha norm residual"),
    "Norm": _asked(f"{_CONV}.epilogue:Norm", fields="mean var weight bias eps"),
    "features_of": _handed(f"{_CONV}.deferred.features:features_of"),
    "histories": _handed(f"{_CONV}.history:histories"),
    "convolution": _handed(f"{_CONV}.convolution", names="MIN_DEFERRED_ELEMENTS"),
    "override": _handed(f"{_CONV}.override", names="inside"),
    # Plans and products.
    "ConvPlan": _handed(
        f"{_CONV}.plan:ConvPlan", "_dense _dgrad _wgrad columns_in forward generation n_offsets separate"
    ),
    "plans": _handed(f"{_CONV}.plan:known_plans", names="generation plans"),
    "GatherProduct": _handed(f"{_CONV}.kernel_products:GatherProduct", "_copied native", "_bind"),
    "WgradProduct": _handed(f"{_CONV}.dataflows.wgrad_product:WgradProduct", "_key", "_bind"),
    "WeightLayout": _asked(".core.geometry.weights:WeightLayout", "rows_of"),
    "GatherGemm": _handed(
        f"{_GEMM}.gather_gemm:GatherGemm", "native", "_addressed _key _numbers grid native spec table"
    ),
    "NarrowGemm": _handed(f"{_GEMM}.narrow_gemm:NarrowGemm"),
    "GemmSpec": _asked(
        f"{_GEMM}.gather_spec:GemmSpec", "c_out columns constants device key native packed tile variants w_stride"
    ),
    "TileConfig": _asked(".kernels.tiles.tile_config:TileConfig", "block_m block_n"),
    "WgradGemm": _asked(f"{_GEMM}.wgrad_gemm:WgradGemm", "_pairs_at direct grid shares spec"),
    "WgradSpec": _asked(
        f"{_GEMM}.wgrad_spec:WgradSpec",
        "device key layout leading n_offsets padding quads row_kinds rows sum_grid sum_key sum_sizes trailing",
    ),
    "wgrad_kernel": _handed(f"{_GEMM}.wgrad_gemm:wgrad_kernel"),
    "sum_shares_kernel": _handed(f"{_GEMM}.wgrad_gemm:sum_shares_kernel"),
    # Maps.
    "KernelMap": _handed(".core.maps.kernel_map:KernelMap", names="flipped rulebook x_fold y_fold"),
    "Rulebook": _asked(
        ".core.maps.rulebook:Rulebook",
        "_observer _tables _tiles backward cache device n_offsets n_rows order regular rows symmetric trained",
    ),
    "Rows": _asked(".core.maps.rows:Rows", fields="host device capacity padding_value estimate"),
    "Derived": _handed(".core.maps.views.derived:Derived", "_entries"),
    "Observer": _asked(".core.maps.views.derived:Observer", "on_view"),
    "Views": _asked(".core.prefetch.recording:Views", fields="tiled requested"),
    "NeighborTable": _asked(".kernels.maps.neighbor_table:NeighborTable", "n_offsets n_rows own"),
    "TileList": _asked(".kernels.maps.tile_list:TileList", "memory n_offsets n_pairs splits"),
    "Part": _handed(f"{_RUNTIME}.parts:Part", names="at"),
    "StreamOrder": _handed(".core.device.stream_order:StreamOrder", "number waited"),
    # Launches and settings.
    "Kernel": _asked(f"{_RUNTIME}.launch:Kernel", "_compiled"),
    "precompile": _handed(f"{_RUNTIME}.precompile", names="dry_runs"),
    "hooks": _handed(f"{_RUNTIME}.triton_compat:HOOKS", names="launch_enter_hook?"),
    "HookChain": _asked("", "calls"),
    "trace": _handed(".core.device.trace", names="recorders"),
    "precision": _handed(".core.device.precision", names="fp16_sums"),
    "settings": _handed(".settings", names="generation get"),
    "Settings": _asked(".settings:Settings", "native"),
    "calls": _handed(".native.calls", names="observer"),
    # torch, and Python.
    "Tensor": _handed(
        "torch:Tensor",
        names="_version data_ptr device dtype is_contiguous is_cuda is_inference new_empty shape stride "
        "untyped_storage",
    ),
    "Parameter": _handed("torch.nn:Parameter"),
    "Storage": _asked("torch:UntypedStorage", "nbytes"),
    "Device": _asked("torch:device", "index"),
    "BatchNorm1d": _asked("", "_buffers _parameters eps forward training"),
    "NormVectors": _asked("", "bias running_mean running_var weight"),
    "norm_forward": _handed("torch.nn:BatchNorm1d.forward"),
    "make_wrapper": _handed("torch:Tensor._make_wrapper_subclass"),
    "no_memory": _handed("torch._C:_set_throw_on_mutable_data_ptr"),
    "float32": _handed("torch:float32"),
    "strided": _handed("torch:strided"),
    "forward_ad": _handed("torch.autograd.forward_ad", names="_current_level"),
    "torch": _handed("torch", names="empty_like"),
    # Functions, asked for at every call, so that tests can replace them.
    "torch_c": _handed(
        "torch._C",
        names="_cuda_getCurrentRawStream? _cuda_getDevice? _get_cublas_allow_fp16_accumulation? "
        "_is_any_autocast_enabled _len_torch_dispatch_stack _len_torch_function_stack is_grad_enabled "
        "is_inference_mode_enabled",
    ),
    "Dict": _asked("builtins:dict", "get"),
    "Object": _asked("builtins:type", "__dict__"),
}

# Values that C has as constants: where Python has them.
VALUES: dict[str, tuple[str, int | str]] = {
    "BY_PYTHON": (f"{_CONV}.kernel_products:BY_PYTHON", 0),
    "OVER_TILES": (f"{_CONV}.kernel_products:OVER_TILES", 1),
    "OVER_TABLE": (f"{_CONV}.kernel_products:OVER_TABLE", 2),
    "STEP_NORM": (f"{_CONV}.epilogue:STEP_NORM", "n"),
    "STEP_SUM": (f"{_CONV}.epilogue:STEP_SUM", "s"),
    "STEP_ACTIVATION": (f"{_CONV}.epilogue:STEP_ACTIVATION", "a"),
    "TILE": (".kernels.maps.tile_list:TILE", 64),
}


def header() -> str:
    """The C header `reads.h`: strings, objects, places of slots, indices of fields, and constants."""
    names = sorted({name.rstrip("?") for owner in OWNERS.values() for name in owner.names.split()})
    lines = [f"static PyObject *string_{name};" for name in names]
    lists = {"STRINGS": names, "HANDED": [name for name, owner in OWNERS.items() if owner.handed]}
    lists["SLOTS"] = [f"{name}, {slot}" for name, owner in OWNERS.items() for slot in owner.slots.split()]
    for name, owner in OWNERS.items():
        if owner.handed:
            lines.append(f"static PyObject *g_{name};")
        lines += [f"static Py_ssize_t o_{name}_{slot};" for slot in owner.slots.split()]
        asked = [asked.rstrip("?") for asked in owner.names.split()]
        lines += [f"#define s_{name}_{one} string_{one}" for one in asked]
        lines += [f"#define i_{name}_{field} {at}" for at, field in enumerate(owner.fields.split())]
    for name, (_, value) in VALUES.items():
        lines.append(f"#define {name} {value if isinstance(value, int) else repr(value)}")
    for name, entries in lists.items():
        lines.append(f"#define {name}(X) " + " ".join(f"X({entry})" for entry in entries))
    return "\n".join(lines) + "\n"


def handed() -> dict[str, Any]:
    """The objects that C has, after the list was compared with all that is loaded. Raises Refusal."""
    objects = {name: resolved(owner.where) for name, owner in OWNERS.items() if owner.handed}
    for name, owner in OWNERS.items():
        if owner.handed or (owner.where and _is_loaded(owner.where)):
            check(name, owner, objects[name] if owner.handed else resolved(owner.where))
    for where, value in VALUES.values():
        if resolved(where) != value:
            raise Refusal(Why.HELPER_READS, where, value)
    return objects


def resolved(where: str) -> Any:
    """The object, or the dictionary of a module, that is there. Raises Refusal where there is none."""
    value: Any = importlib.import_module(_module_of(where))
    if ":" not in where:
        return vars(value)
    module, _, path = where.partition(":")
    for part in path.split("."):
        value = getattr(value, part, _NOTHING)
    if value is _NOTHING:
        raise Refusal(Why.HELPER_READS, module, path)
    return value


def _module_of(where: str) -> str:
    module = where.partition(":")[0]
    return _PACKAGE + module if module.startswith(".") else module


def _is_loaded(where: str) -> bool:
    """Whether its module is imported, and not halfway."""
    module = sys.modules.get(_module_of(where))
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def check(name: str, owner: Owner, value: Any) -> None:
    """Raise Refusal where an owner does not have what C reads of it."""
    lacking = [
        slot for slot in owner.slots.split() if type(getattr(value, slot, None)) is not types.MemberDescriptorType
    ]
    if owner.fields and getattr(value, "_fields", None) != tuple(owner.fields.split()):
        lacking.append(owner.fields)
    names = {one for one in owner.names.split() if not one.endswith("?")}
    names = {one for one in names if not (one in value if isinstance(value, dict) else hasattr(value, one))}
    if names and isinstance(value, type):
        names -= _attributes(value, names)
    if lacking or names:
        raise Refusal(Why.HELPER_READS, owner.where or name, ", ".join([*lacking, *sorted(names)]))


def _attributes(cls: type, names: set[str]) -> set[str]:
    """Those of some names that objects of a class of ours get from its functions, or that it lists with a type."""
    found: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(_PACKAGE):
            continue
        found.update(names.intersection(getattr(base, "__annotations__", ())))
        for function in vars(base).values():
            if isinstance(function, types.FunctionType) and (names - found).intersection(function.__code__.co_names):
                stores = [one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR"]
                found.update(names.intersection(stores))
    return found
