"""The plan of a layer's convolution together with the norm and the activation that followed it.

A layer whose results have gone on to them is launched with them at its call, before they are
called. Whether plan and launch still fit its operands, one question to torch tells: the guards that
its compiler puts before graphs compare kinds, dtypes, devices, shapes and strides, and whether a
mode of torch would see the operations.
"""

from __future__ import annotations

import torch

from ... import settings
from ..device.torch_compat import TENSOR_GUARDS, guards
from ..maps.kernel_map import KernelMap
from . import override
from .epilogue import Epilogue, Norm
from .history import History, LayerCall
from .plan import ConvForm, ConvPlan, run_plan


class FusedPlan:
    """What `steps` behind a layer's convolution have made of it.

    steps: as of `History`.  activation: the last of them, and its slope.  shown: how often modules
    behind it were looked at.
    """

    __slots__ = (
        "_between", "_end", "_form", "_generation", "_plan", "_same", "_vectors", "activation",
        "shown", "steps",
    )  # fmt: skip

    def __init__(
        self, plan: ConvPlan, operands: tuple[torch.Tensor, torch.Tensor], form: ConvForm,
        epilogue: Epilogue, steps: str,
    ) -> None:  # fmt: skip
        bias, name, alpha, norm, _ = epilogue
        self.steps, self.activation, self.shown = steps, (name, alpha), 0
        self._end, self._between = epilogue._replace(residual=None), Epilogue(bias, norm=norm)
        self._plan, self._form, self._generation = plan, form, settings.generation
        self._vectors = tuple([one for one in epilogue.vectors[1:5] if one is not None])
        read = self._vectors if bias is None else (bias, *self._vectors)
        self._same = guards(*operands, *read, any_rows=True)

    def call(
        self, history: History, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap,
        epilogue: Epilogue, form: ConvForm,
    ) -> LayerCall | None:  # fmt: skip
        """A call of the layer, which is launched with the steps unless a sum is one of them: nobody
        knows its features. None where anything is not as it was."""
        plan, between, rulebook = self._plan, self._between, kmap.rulebook
        bias, norm = epilogue[0], epilogue[3]
        if bias is not between[0]:
            if bias is None or between[0] is None:
                return None
            between = between._replace(bias=bias)  # a view of it, made anew at every call
        if norm is not None and not same(norm, between[3]):
            return None
        vectors, n_rows, side = self._vectors, rulebook.n_rows, int(kmap.flipped)
        if not (
            self._generation == settings.generation
            and not override.inside
            and (form is self._form or form == self._form)
            and (
                self._same(x, weight, *vectors)
                if bias is None
                else self._same(x, weight, bias, *vectors)
            )
            and x.shape[0] == n_rows[1 - side]
            and rulebook.n_offsets == plan.n_offsets
            and rulebook.regular == plan.case.regular
            and rulebook.device == plan.case.device
        ):
            return None
        shape = n_rows[side], plan.columns_out
        call = LayerCall((x, weight, kmap, form), shape, history, self.steps)
        count = 0
        for one in vectors:
            count += one._version
        call.fused, call.between, call.changes = self, between, count
        if "s" not in self.steps:
            call.launched = self.launch(call, None)
        return call

    def launch(self, call: LayerCall, residual: torch.Tensor | None) -> torch.Tensor:
        """What the steps make of the convolution; residual: contiguous, like the result."""
        plan, (x, weight, kmap, _), end = self._plan, call.given, self._end
        if residual is not None or end[0] is not call.between[0]:
            end = Epilogue(call.between[0], *self.activation, end[3], residual)
        rulebook = kmap.rulebook
        rows = rulebook.n_rows
        if plan.separate or not (rows[0] and rows[1]):
            return run_plan(plan, x, weight, kmap, end)
        return plan.forward(rulebook, int(kmap.flipped), x, weight, end)


def fused_plan(
    plan: ConvPlan, operands: tuple[torch.Tensor, torch.Tensor], form: ConvForm,
    epilogue: Epilogue, steps: str,
) -> FusedPlan | None:  # fmt: skip
    """For the next call of a layer; None where it is to wait for all that follows."""
    if TENSOR_GUARDS is None or not plan.lasts:
        return None
    if torch._C._is_any_autocast_enabled():  # operands are copies then
        return None
    return FusedPlan(plan, operands, form, epilogue, steps)


def same(norm: Norm, other: Norm | None) -> bool:
    """Whether two norms are of the same tensors."""
    return (
        other is not None
        and norm[0] is other[0] and norm[1] is other[1] and norm[2] is other[2]
        and norm[3] is other[3] and norm[4] == other[4]
    )  # fmt: skip
