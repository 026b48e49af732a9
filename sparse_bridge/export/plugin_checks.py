"""What Autoware's TensorRT plugins check of a node, as one table.

Counts, dimensions and dtypes are those that `perception/autoware_tensorrt_plugins` of
autoware_universe declares (spring of 2026): its older form, too, where it still builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UnsupportedError


class ExportError(UnsupportedError):
    """A network that the nodes of the plugins or a package cannot express, a file that they refuse,
    or an input that does not fit."""


class _Value(NamedTuple):
    """An input or output. dtype: `int32`, or `float`: float32 or float16, alike in the whole node.
    dims: numbers, or letters that stand for one size each in the whole node."""

    name: str
    dtype: str
    dims: str


class _Rule(NamedTuple):
    """optional: how many of the last inputs may be missing.  attributes: type and length by name;
    `?` behind the type: older files lack it."""

    inputs: tuple[_Value, ...]
    outputs: tuple[_Value, ...]
    attributes: Mapping[str, tuple[str, int]]
    optional: int = 0


_PAIRS = {
    **dict.fromkeys(("batch_size", "algo", "subm", "transpose"), ("INT", 1)),
    **dict.fromkeys(("spatial_shape", "ksize", "stride", "padding", "dilation", "out_padding"), ("INTS", 3)),
}
_SITES = _Value("sites", "int32", "M 4")
_COUNT = _Value("number of sites", "int32", "")
_ROWS, _FILTERS = _Value("features", "float", "N C"), _Value("weight", "float", "K a b c C")
_PRODUCT = _Value("result", "float", "M K")

RULES = {
    "GetIndicePairsImplicitGemm": _Rule(
        (_Value("coordinates", "int32", "N 4"),),
        (
            _SITES,
            _Value("pair table", "int32", "V M"),
            _Value("masks", "int32", "M 1"),
            _Value("row order", "int32", "M"),
            _COUNT,
        ),
        {**_PAIRS, "is_train": ("INT", 1), "do_sort": ("INT?", 1)},
    ),
    "GetIndicePairs": _Rule(
        (_Value("coordinates", "int32", "N 4"),),
        (_SITES, _Value("pairs", "int32", "2 V N"), _Value("pair counts", "int32", "V"), _COUNT),
        _PAIRS,
    ),
    "ImplicitGemm": _Rule(
        (
            _ROWS,
            _FILTERS,
            _Value("pair table", "int32", "V M"),
            _Value("masks", "int32", "M 1"),
            _Value("row order", "int32", "M"),
            _Value("bias", "float", "K"),
        ),
        (_PRODUCT,),
        {
            **dict.fromkeys(("is_train", "is_subm"), ("INT", 1)),
            "act_type": ("INT?", 1),
            **dict.fromkeys(("act_alpha", "act_beta", "output_scale", "output_add_scale"), ("FLOAT", 1)),
        },
        optional=1,
    ),
    "IndiceConv": _Rule(
        (_ROWS, _FILTERS, _Value("pairs", "int32", "2 V M"), _Value("pair counts", "int32", "V"), _COUNT),
        (_PRODUCT,),
        {"is_subm": ("INT", 1)},
    ),
}
_VALUES = {  # what an attribute may be
    ("ImplicitGemm", "act_type"): range(4),
    ("GetIndicePairs", "subm"): (1,),
}


def check(op_type: str, attributes: Mapping[str, tuple[str, Any]], inputs: Sequence[Any], n_outputs: int) -> None:
    """Raise ExportError for a node that the plugin `op_type` refuses.

    attributes: ONNX's name of the type, and the value, by name.  inputs: arrays.
    """
    rule = RULES[op_type]
    least = len(rule.inputs) - rule.optional
    if not least <= len(inputs) <= len(rule.inputs):
        raise ExportError(f"{op_type} has {len(inputs)} inputs; the plugin takes {least} to {len(rule.inputs)}.")
    if n_outputs != len(rule.outputs):
        raise ExportError(f"{op_type} has {n_outputs} outputs; the plugin gives {len(rule.outputs)}.")
    _check_attributes(op_type, rule, attributes)
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for value, array in zip(rule.inputs, inputs, strict=False):
        _check_array(op_type, value, array, sizes, dtypes)


def _check_attributes(op_type: str, rule: _Rule, actual: Mapping[str, tuple[str, Any]]) -> None:
    for name, (declared, length) in rule.attributes.items():
        if name not in actual:
            if declared.endswith("?"):
                continue
            raise ExportError(f"{op_type} lacks the attribute {name}.")
        type_name, value = actual[name]
        if type_name != declared.rstrip("?") or (length > 1 and len(value) != length):
            raise ExportError(
                f"{op_type}: {name} is {type_name} {value}; expected {declared.rstrip('?')}"
                + (f" of length {length}." if length > 1 else ".")
            )
        allowed = _VALUES.get((op_type, name))
        if allowed is not None and value not in allowed:
            raise ExportError(f"{op_type}: {name} is {value}; expected one of {list(allowed)}.")


def _check_array(op_type: str, value: _Value, array: Any, sizes: dict[str, int], dtypes: set[str]) -> None:
    dtype, dims = str(array.dtype), value.dims.split()
    if value.dtype == "float":
        dtypes.add(dtype)
        if dtype not in ("float32", "float16") or len(dtypes) > 1:
            raise ExportError(
                f"{op_type}: {value.name} is {dtype} beside {sorted(dtypes)}; the plugin takes "
                "float32 or float16, alike in one node."
            )
    elif dtype != value.dtype:
        raise ExportError(f"{op_type}: {value.name} is {dtype}; expected {value.dtype}.")
    expected = [int(d) if d.isdigit() else sizes.get(d) for d in dims]
    shape = list(array.shape)
    if len(shape) != len(dims) or any(size not in (None, got) for size, got in zip(expected, shape, strict=True)):
        raise ExportError(
            f"{op_type}: {value.name} is {shape}; expected [{', '.join(dims)}]"
            + "".join(f", {d} = {sizes[d]}" for d in dims if d in sizes)
            + "."
        )
    sizes.update((d, got) for d, got in zip(dims, shape, strict=True) if not d.isdigit())
