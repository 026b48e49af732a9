"""Layers of kernel volume 1: one matrix product over all rows.

cuBLAS divides sums of fp32 among programs, or not, by the number of rows, and looks for a kernel at
every number that it has not met: in half precision that takes the host 200 to 500 us (CUDA 13,
H200), where the product takes the GPU 10. Scenes have new numbers of rows all the time. So such
products are convolutions over the identity map: the same compiled kernel for any number of rows,
and the same bits of a row.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ... import memory, settings, state
from ..conv import host_products, override
from ..conv.convolution import autocast_dtype, convolve, transformed
from ..conv.dataflow import Case
from ..conv.deferred.conv import DeferredConv
from ..conv.epilogue import Epilogue
from ..conv.layers import convolve_layer
from ..conv.plan import ConvForm
from ..conv.registry import row_kernels
from ..device import memory_use, rocm
from ..device.precision import KERNEL_DTYPES
from ..device.selection import stands_in
from ..device.torch_compat import allows_tf32
from ..maps.kernel_map import KernelMap
from ..maps.pair_lists import DevicePairs
from ..maps.rows import Rows, rows_of_number, scoped_cache
from ..maps.rulebook import Rulebook

FORM = ConvForm("vio", 1, "ieee", "unmasked")
_TF32 = FORM._replace(precision="tf32")
DEVICES = ("cuda",)  # where kernels multiply
# Values of a weight above which products of halves are cuBLAS's, which takes them 0.6 times as long
# (1024 channels, H100) and gave the kernel's bits there, for any number of rows.
_MOST_WEIGHT = 1 << 17
_MAPS = 64  # identity maps that are kept, of the last numbers of rows
_LEAST = 1 << 17  # rows that the first of them have room for

_Key = tuple[int, int, bool]  # GPU, rows, whether pairs are listed
_maps: collections.OrderedDict[_Key, KernelMap] = collections.OrderedDict()
# What captured graphs read stays: nobody tells when the last of them is gone.
_captured: dict[_Key, KernelMap] = {}
_rows: dict[int, list[torch.Tensor]] = collections.defaultdict(list)  # all stay: graphs read them
_lock = threading.Lock()
# By device and dtype: under which generation of the settings it was found out, and what.
_served: dict[tuple[torch.device, torch.dtype], tuple[int, bool]] = {}
# `linear` in a graph, once operators are there.
as_operator: Callable[..., torch.Tensor] | None = None


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, C_in] @ w [C_in, C_out] + bias ([C_out], [1, C_out] or None), with gradients; follows autocast.

    x: fp16 / bf16 / fp32 / fp64, as w and bias unless autocast is on. Returns [N, C_out] in that dtype, or
    autocast's. In a graph, which serves any number of rows, products of any size are the kernel's.
    Raises: what torch does for tensors that do not fit together; under a limit on memory MemoryLimitError, and
        UnsupportedError where gradients are recorded.
    """
    # While compiling first of all: the number of rows is not to be looked at.
    if torch.compiler.is_compiling():
        return (as_operator or rocm.linear)(x, w, bias)
    if not (x.device.type in DEVICES or stands_in()) or not by_kernel(x, w, bias):
        if memory.limit is not None:
            _make_room(x, w)
        return rocm.linear(x, w, bias) if transformed() else host_products.linear(x, w, bias)
    kmap = identity(x.shape[0], x.device, torch.is_grad_enabled())
    if kmap is None:
        return rocm.linear(x, w, bias)
    return convolve(x, w[None], kmap, Epilogue(None if bias is None else bias.flatten()), form_of(x))


def _make_room(x: torch.Tensor, w: torch.Tensor) -> None:
    """For torch's product, which is made in one piece: nothing but the result can be saved."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        memory_use.refuse_gradients()
    shape, dtype = (x.shape[0], w.shape[1]), dtype_of(x, w, None) or x.dtype
    memory_use.need(x.device, math.prod(shape) * dtype.itemsize, f"a product of {list(shape)}", x, w)


def linear_layer(
    owner: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | DeferredConv:
    """`linear` of a layer, [N, C_out] in the same dtype, which can be deferred to the norm behind it: see
    `convolve_layer`.

    owner: the layer, or its weight.
    Raises: what `linear` does.
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not (x.device.type in DEVICES or stands_in())
        or not by_kernel(x, w, bias)
        or (kmap := identity(x.shape[0], x.device, False)) is None
    ):
        return linear(x, w, bias)
    epilogue = Epilogue(None if bias is None else bias.flatten())
    y: torch.Tensor | DeferredConv = convolve_layer(owner, x, w[None], kmap, epilogue, form_of(x))
    return y


def by_kernel(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether kernels compute x [N, C_in] times w [C_in, C_out]: they take the dtypes (fp16 / bf16 / fp32) and
    sizes, there are rows, no setting and no functorch transform asks for something else, and the device has passed
    its checks."""
    dtype = dtype_of(x, w, bias)
    return (
        dtype is not None
        and takes(dtype, w)
        and x.shape[0] > 0
        and not (override.inside and override.current())
        and not transformed()
        and launched(x.device, dtype)
    )


def takes(dtype: torch.dtype, w: torch.Tensor) -> bool:
    """Whether products by this weight w [C_in, C_out] are for kernels, where those serve `dtype`: by the layer alone.
    fp32 always; halves up to 2^17 values, beyond which cuBLAS is faster."""
    return dtype in KERNEL_DTYPES and (dtype == torch.float32 or 0 < w.numel() <= _MOST_WEIGHT)


def form_of(x: torch.Tensor) -> ConvForm:
    """How the product of x [N, C_in] is computed: fp32 by torch's own switch (`allow_tf32`), as torch's product
    would be."""
    tf32 = x.dtype == torch.float32 and allows_tf32()
    return _TF32 if tf32 else FORM


def dtype_of(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """The dtype in which x [N, C_in], w [C_in, C_out] and bias are multiplied: x's, or autocast's (fp64 is left
    alone). None where dtypes differ outside of autocast: torch has an error of its own."""
    cast = autocast_dtype(x.device)
    if cast is None and (w.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype)):
        return None
    return x.dtype if cast is None or x.dtype == torch.float64 else cast


def launched(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply `dtype`, as settings and machine are."""
    cached = _served.get((device, dtype))
    if cached is not None and cached[0] == settings.generation:
        return cached[1]
    generation = settings.generation
    served = settings.get().dataflow == "auto" and row_kernels(Case(device, dtype))[1] is not None
    _served[device, dtype] = generation, served
    return served


def identity(n_rows: int, device: torch.device, listed: bool) -> KernelMap | None:
    """Every row onto itself, with the lists that gradients need where `listed`; device: with its
    index on a GPU. In a padded input one of its own, whose lists end with the rows in use. None in
    the capture of a graph, whose memory a new map would be, where there is none yet."""
    if (scoped := scoped_cache()) is not None and (used := rows_of_number(n_rows)).device is not None:
        own: KernelMap | None = scoped.get(("identity", n_rows, listed))
        if own is None:
            own = scoped["identity", n_rows, listed] = build_identity(n_rows, device, listed, used)
        return own
    key = (-1 if device.index is None else device.index), n_rows, listed
    with _lock:
        kmap = _captured.get(key) or _maps.get(key)
        if capturing(device):
            if kmap is not None:
                _captured[key] = kmap
            return kmap
        if kmap is None:
            kmap = _maps[key] = build_identity(n_rows, device, listed)
            if len(_maps) > _MAPS:
                _maps.popitem(last=False)
        elif key in _maps:
            _maps.move_to_end(key)
        return kmap


@state.owns
def reset() -> None:
    """Forget the identity maps, but those that captured graphs read, and what kernels serve."""
    with _lock:
        _maps.clear()
    _served.clear()


def build_identity(n_rows: int, device: torch.device, listed: bool, used: Rows | None = None) -> KernelMap:
    """`identity` anew. used: the rows in use, if not all are."""
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():  # what watches a model's operations is not told
            return build_identity(n_rows, device, listed, used)
    return KernelMap(_identity(row_numbers(device, n_rows)[:n_rows], listed, used))


def capturing(device: torch.device) -> bool:
    """Whether the current CUDA stream is being captured as a graph. Never on other devices."""
    return device.type == "cuda" and bool(torch._C._cuda_isCurrentStreamCapturing())


def row_numbers(device: torch.device, n_rows: int) -> torch.Tensor:
    """0, 1, ... as int32 [n_rows] or more."""
    numbers = _rows[-1 if device.index is None else device.index]
    rows = numbers[-1] if numbers else None
    if rows is None or len(rows) < n_rows:
        room = max(_LEAST, 1 << (n_rows - 1).bit_length())
        rows = torch.arange(room, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # for all streams, once
        numbers.append(rows)  # behind which another thread may put fewer
    return rows


def _identity(rows: torch.Tensor, listed: bool, used: Rows | None) -> Rulebook:
    from ...kernels.maps.neighbor_table import NeighborTable

    table, n_rows = NeighborTable(rows[None]), len(rows)
    ends = n_rows if used is None else used
    rulebook = Rulebook(ends, ends, 1, rows.device, views=(table, table))
    if listed:
        starts = torch.arange(0, 2 * n_rows, n_rows, device=rows.device)
        if used is not None and used.device is not None:
            starts = torch.arange(2, device=rows.device) * (used.device + 1)
        rulebook.pairs_are(DevicePairs(rows, rows, starts, False, n_rows, n_rows))
    return rulebook
