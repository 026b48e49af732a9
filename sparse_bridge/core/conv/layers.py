"""Convolutions of layers, which know what followed their earlier results.

A layer is launched at its call with all that followed it last time, if its operands are such that
nothing has to be decided again (`fused_plan`); else it is deferred (`deferred`), or is computed
at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ... import hooks, log, memory, native, settings, state
from ...native import calls as native_calls
from ..device import precision, trace
from ..device.selection import stands_in
from ..device.torch_compat import allows_fp16_sums, eagerly
from ..maps.kernel_map import KernelMap
from . import convolution, override
from .convolution import convolve_layer
from .deferred.conv import DeferredConv
from .epilogue import STEP_NORM, Epilogue
from .fused_plan import fused_plan, same
from .history import DISABLED, LayerCall, changes_of, histories, history_of, may_defer
from .plan import ConvForm, find, run

__all__ = ["convolve_layer"]

_functions = torch._C._len_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_on, _generation = True, -1


def _renew() -> None:
    """Read from the settings whether launches may be deferred."""
    global _on, _generation
    now = settings.generation
    if hooks.REPLACED_BEFORE:
        text = "functions of torch were replaced before sparse_bridge was enabled: nothing is fused or replayed"
        log.once(("functions of torch",), text)
    # Trials hold a layer's result twice.
    _on = settings.get().optimize != "off" and memory.limit is None and not hooks.REPLACED_BEFORE
    _generation = now  # last: other threads go by it


@state.owns
def reset() -> None:
    """Forget what the settings said."""
    global _on, _generation
    _on, _generation = True, -1


@eagerly
def _convolve(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor | DeferredConv:
    """`convolve_layer` without gradients and outside of inference mode."""
    y = known_call(owner, x, weight, kmap, epilogue, form)
    if y is not None:
        return y
    if epilogue[1] is not None:
        return _with_full_epilogue(owner, x, weight, kmap, epilogue, form)
    columns = weight.shape[0 if form[0] == "ovi" else -1]
    rows = kmap.rulebook.rows[kmap.flipped]
    # In a captured graph the host's time does not count.
    least = convolution.MIN_DEFERRED_ELEMENTS[x.is_cuda or stands_in()]
    if rows.device is not None or rows.capacity * columns >= least:
        return _begin_deferred(owner, x, weight, kmap, epilogue, form)
    return convolution.convolve(x, weight, kmap, epilogue, form)


@eagerly
def known_call(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor | DeferredConv | None:
    """A call without gradients and outside of inference mode, where the layer's last calls tell all that is to be
    decided; None where they do not. Result: [N_out, C_out], fp16 / bf16 / fp32 / fp64 as of `convolve`, or what
    stands for it.

    With a sum among the steps it is launched at that: nobody knows its features.
    Twin in C: `known_call`.
    """
    entry = histories.get(id(owner))
    if entry is None or entry[0]() is not owner:
        return None
    history = entry[1]
    bias, activation, alpha, norm, residual = epilogue
    plan = history.plan if activation is None else history.full_plan
    if plan is None:
        return None
    if (by_helper := native_calls.known_call) is not None:
        y = by_helper(owner, x, weight, kmap, epilogue, form)
        if y is not NotImplemented:
            return y  # type: ignore[no-any-return]
    if allows_fp16_sums() is not precision.fp16_sums:
        precision.follow_torch()
    if residual is not None or plan.generation != settings.generation:
        return None
    vectors, between, rulebook, side = plan.vectors, plan.between, kmap.rulebook, kmap.flipped
    if bias is not between[0]:
        if bias is None or between[0] is None:
            return None
        between = between._replace(bias=bias)  # a view of it, made anew at every call
    if _any_autocast():  # under which the plan was made, or the guards tell
        x, weight = convolution.autocast_operands(x, weight)
    if (
        not (form is plan.form or form == plan.form)
        or (norm is not None and not same(norm, between[3]))
        # Transforms, tracing and modes of dispatch are seen by the guards.
        or _functions()
        or forward_ad._current_level >= 0
        or override.inside
        or trace.recorders
        or kmap.x_fold is not None
        or kmap.y_fold is not None
        or not (plan.same(x, weight, *vectors) if bias is None else plan.same(x, weight, bias, *vectors))
        or rulebook.n_offsets != plan.n_offsets
        or rulebook.regular != plan.regular
        or rulebook.device != plan.device
        or x.shape[0] != rulebook.n_rows[not side]
    ):
        return None
    rows = rulebook.rows[side]
    if activation is not None:
        if plan.activation != (activation, alpha) or (norm is None) != (between[3] is None):
            return None
        return plan.launch((x, weight, kmap, form), bias, None)
    included = "" if norm is None else STEP_NORM
    least = convolution.MIN_DEFERRED_ELEMENTS[x.is_cuda or stands_in()]
    if history.disabled or history.seen != plan.steps or (rows.device is None and rows.capacity * plan.columns < least):
        return None
    operands = (x, weight, kmap, form)
    call = LayerCall(operands, (rulebook.n_rows[side], plan.columns), history, plan.steps)
    changes = 0
    for vector in vectors:
        changes += vector._version
    call.fused, call.between, call.changes = plan, between, changes
    if plan.at_the_call:
        call.launched = plan.launch(operands, bias, None)
    history.seen, history.alone = included, 0
    count = x._version + weight._version
    if bias is not None:
        count += bias._version
    return DeferredConv(call, epilogue, included, count if norm is None else count + changes)


def _with_full_epilogue(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor:
    """A call with a complete epilogue; it leaves a plan for the next one."""
    if _generation != settings.generation:
        _renew()
    if (
        not _on
        or epilogue[4] is not None
        or not may_defer(x, weight, kmap, epilogue)
        or (history := history_of(owner)).plans.over
    ):
        return convolution.convolve(x, weight, kmap, epilogue, form)
    x, weight = convolution.autocast_operands(x, weight)
    y, plan = run(x, weight, kmap, epilogue, form)
    history.full_plan = fused_plan(plan, (x, weight), form, epilogue, "")
    history.plans.due()
    return y


def _begin_deferred(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor | DeferredConv:
    """A call without an activation whose result is large enough to be deferred."""
    if _generation != settings.generation:
        _renew()
    history = history_of(owner) if _on and not trace.recorders else DISABLED
    included, residual = "" if epilogue[3] is None else STEP_NORM, epilogue[4]
    if history.disabled or residual is not None:
        return convolution.convolve(x, weight, kmap, epilogue, form)
    if not may_defer(x, weight, kmap, epilogue):  # what is known of earlier calls stays known
        return convolution.convolve(x, weight, kmap, epilogue, form)
    target = history.begin(included)
    x, weight = convolution.autocast_operands(x, weight)
    plan = find(x, weight, kmap, epilogue, form)  # whose errors belong here
    shape = kmap.rulebook.n_rows[kmap.flipped], plan.columns_out
    call = LayerCall((x, weight, kmap, form), shape, history, target)
    deferred = DeferredConv(call, epilogue, included, changes_of(x, weight, epilogue))
    if not target:
        deferred.keep_result(convolution.convolve(x, weight, kmap, epilogue, form))
    return deferred


convolution.convolve_deferred = _convolve
native.when_ready(native_calls.use)  # at the end of the file that imports most of what the helper reads
