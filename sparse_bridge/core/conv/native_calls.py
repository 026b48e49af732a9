"""The compiled helper's functions for calls of layers; None where Python does all.

Each repeats a Python function, which calls it first, and answers NotImplemented where that function
is to decide; see `native/native.c`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ... import settings

if TYPE_CHECKING:
    from .fused_plan import FusedPlan

helper: Any = None
known_call: Any = None
features_of: Any = None
normalised: Any = None
activated: Any = None
plus: Any = None
spconv_known: Any = None
observer: Any = None  # the class of what hears which views of maps are wanted; set by `capture`


def use(module: Any) -> None:
    """Hand the helper what it reads, and use it. Called once the modules below are imported: they
    import this one."""
    from torch.autograd import forward_ad

    from ...kernels.gemm.gather_gemm import GatherGemm
    from ...kernels.runtime import precompile
    from ...kernels.runtime.triton_compat import HOOKS
    from ..device import trace
    from ..device.stream_order import StreamOrder
    from ..maps.kernel_map import KernelMap
    from ..maps.rulebook import Derived
    from . import convolution, fused_call, override
    from .fused_plan import FusedPlan
    from .history import History, LayerCall, histories
    from .kernel_products import GatherProduct
    from .pending import PendingConv
    from .waiting.tensors import Waiting, features_of

    module.configure({
        "Derived": Derived, "FusedPlan": FusedPlan, "GatherProduct": GatherProduct,
        "History": History, "StreamOrder": StreamOrder, "calls": globals(),
        "features_of": features_of,
        "convolution": vars(convolution), "forward_ad": vars(forward_ad),
        "fused_call": vars(fused_call), "override": vars(override),
        "precompile": vars(precompile), "settings": vars(settings), "torch_c": vars(torch._C),
        "trace": vars(trace), "histories": histories, "hooks": HOOKS, "GatherGemm": GatherGemm,
        "KernelMap": KernelMap, "LayerCall": LayerCall, "Parameter": torch.nn.Parameter,
        "PendingConv": PendingConv, "Tensor": torch.Tensor, "Waiting": Waiting,
        "make_wrapper": torch.Tensor._make_wrapper_subclass,
        "no_memory": torch._C._set_throw_on_mutable_data_ptr, "strided": torch.strided,
        "norm_forward": torch.nn.BatchNorm1d.forward,
    })  # fmt: skip
    global helper
    for name in FUNCTIONS:
        globals()[name] = getattr(module, name)
    helper = module


FUNCTIONS = ("known_call", "features_of", "normalised", "activated", "plus", "spconv_known")


def known(plan: FusedPlan, product: Any) -> Any:
    """A plan for the helper; None where it is not used.  product: the GatherProduct that launches
    it, or None."""
    if helper is None or not settings.get().native:
        return None
    keys, tuned, specs, units, by_rule = (0, 0), None, {}, 1, False
    if product is not None:
        keys, tuned, specs, units, by_rule = product.for_helper()
    bound = [("bound", key) for key in keys]
    return helper.Known(
        product, *keys, *bound, tuned, specs, plan.form, plan.between, plan.vectors, plan.read,
        plan.same, plan.n_offsets, plan.regular, plan.device, plan.activation, plan.steps,
        plan.columns, plan.generation, units, plan.at_the_call, by_rule,
    )  # fmt: skip
