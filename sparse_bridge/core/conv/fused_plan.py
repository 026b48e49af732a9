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
from ..maps.rulebook import Rulebook
from .epilogue import Epilogue, Norm
from .plan import ConvForm, ConvPlan, run_plan

Given = tuple[torch.Tensor, torch.Tensor, KernelMap, ConvForm]


class FusedPlan:
    """What `steps` behind a layer's convolution have made of it; "" where its calls say themselves
    what follows.

    steps: as of `History`.  activation: the last of them, and its slope.  shown: how often modules
    behind it were looked at.  at_the_call: it needs no features to add.  between: bias and norm;
    vectors: of the norm.  same(x, weight, bias if there is one, *vectors): whether operands are of
    the kinds and sizes that it was made for.  columns: of the result.
    """

    __slots__ = (
        "_end", "_plan", "activation", "at_the_call", "between", "columns", "form", "generation",
        "same", "shown", "steps", "vectors",
    )  # fmt: skip

    def __init__(
        self, plan: ConvPlan, operands: tuple[torch.Tensor, torch.Tensor], form: ConvForm,
        epilogue: Epilogue, steps: str,
    ) -> None:  # fmt: skip
        bias, name, alpha, norm, _ = epilogue
        self.steps, self.activation, self.shown = steps, (name, alpha), 0
        self.at_the_call = "s" not in steps
        self._end, self.between = epilogue._replace(residual=None), Epilogue(bias, norm=norm)
        self._plan, self.form, self.generation = plan, form, settings.generation
        self.columns = plan.columns_out
        self.vectors = tuple([one for one in epilogue.vectors[1:5] if one is not None])
        read = self.vectors if bias is None else (bias, *self.vectors)
        self.same = guards(*operands, *read, any_rows=True)

    def fits(self, rulebook: Rulebook) -> bool:
        """Whether it serves such maps, too."""
        plan = self._plan
        case = plan.case
        return (
            rulebook.n_offsets == plan.n_offsets
            and rulebook.regular == case.regular
            and rulebook.device == case.device
        )

    def launch(
        self, given: Given, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """What the steps make of the convolution; residual: contiguous, like the result."""
        plan, (x, weight, kmap, _), end = self._plan, given, self._end
        if residual is not None or end[0] is not bias:
            end = Epilogue(bias, *self.activation, end[3], residual)
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
    return FusedPlan(plan, operands, form, epilogue, steps)


def same(norm: Norm, other: Norm | None) -> bool:
    """Whether two norms are of the same tensors."""
    return (
        other is not None
        and norm[0] is other[0] and norm[1] is other[1] and norm[2] is other[2]
        and norm[3] is other[3] and norm[4] == other[4]
    )  # fmt: skip
