"""The plan of a layer's convolution together with the norm and the activation that followed it.

A layer whose results have gone on to them is launched with them at its call, before they are
called. Whether plan and launch still fit its operands, one question to torch tells: the guards that
its compiler puts before graphs compare kinds, dtypes, devices, shapes and strides, and whether a
mode of torch would see the operations.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import settings
from ...native import calls as native_calls
from ..device.torch_compat import TENSOR_GUARDS, guards
from ..maps.kernel_map import KernelMap
from .epilogue import STEP_SUM, Epilogue, Norm
from .plan import ConvForm, ConvPlan, run_plan

Operands = tuple[torch.Tensor, torch.Tensor, KernelMap, ConvForm]


class FusedPlan:
    """A layer's convolution with the `steps` behind it; "" where its calls bring a complete epilogue.

    steps: as of `History`.  activation: the last of them, and its slope.  lookups: how often modules
    behind it were inspected.  at_the_call: it needs no features to add.  between: bias and norm;
    vectors: of the norm.  same(x, weight, bias if there is one, *vectors): whether operands are of
    the kinds and sizes that it was made for.  columns: of the result.  n_offsets, regular, device:
    of the maps that it serves.  read: what kernels read beside x and the weight.  native: the same
    for the compiled helper, or None.
    """

    __slots__ = (
        "_end",
        "_over",
        "_plan",
        "activation",
        "at_the_call",
        "between",
        "columns",
        "device",
        "form",
        "generation",
        "lookups",
        "n_offsets",
        "native",
        "read",
        "regular",
        "same",
        "steps",
        "vectors",
    )

    def __init__(
        self,
        plan: ConvPlan,
        operands: tuple[torch.Tensor, torch.Tensor],
        form: ConvForm,
        epilogue: Epilogue,
        steps: str,
    ) -> None:
        bias, name, alpha, norm, _ = epilogue
        self.steps, self.activation, self.lookups = steps, (name, alpha), 0
        self.at_the_call = STEP_SUM not in steps
        self._end, self.between = epilogue._replace(residual=None), Epilogue(bias, norm=norm)
        self._plan, self.form, self.generation = plan, form, settings.generation
        self.columns, self.n_offsets = plan.columns_out, plan.n_offsets
        self.regular, self.device = plan.case.regular, plan.case.device
        self.vectors = tuple([vector for vector in epilogue.vectors[1:5] if vector is not None])
        read = self.vectors if bias is None else (bias, *self.vectors)
        self.same = guards(*operands, *read, any_rows=True)
        # What a launch by kernels reads, where nothing has to be copied for it.
        self.read = self._end.vectors
        x, direct = operands[0], not plan.separate
        direct = direct and (x.stride(1) == 1 or x.shape[1] == 1)
        self._over: Any = getattr(plan.forward, "over", None) if direct else None
        # Compiled kernels are told a stride of x that is not its columns, see `GatherGemm`.
        over = self._over is not None and x.stride(0) == x.shape[1]
        self.native = native_calls.known(self, plan.forward if over else None)

    def launch(self, operands: Operands, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        """The convolution with its steps: [N_out, C_out] in x's dtype.

        bias: [C_out] or None, as the layer has one.  residual: contiguous, like the result, or None.
        """
        x, weight, kmap, _ = operands
        rulebook, alike = kmap.rulebook, residual is None and bias is self.between[0]
        rows = rulebook.n_rows
        if self._over is not None and rows[0] and rows[1]:
            vectors = self.read if alike else (bias, *self.read[1:5], residual)
            y: torch.Tensor = self._over(rulebook, int(kmap.flipped), x, weight, vectors)
            return y
        end = self._end if alike else Epilogue(bias, *self.activation, self._end[3], residual)
        return run_plan(self._plan, x, weight, kmap, end)


def fused_plan(
    plan: ConvPlan, operands: tuple[torch.Tensor, torch.Tensor], form: ConvForm, epilogue: Epilogue, steps: str
) -> FusedPlan | None:
    """For the next call of a layer; None where it is to be deferred to all that follows. operands: (x [N_in, C_in],
    weight) of one float dtype, as they are multiplied."""
    if TENSOR_GUARDS is None or not plan.lasts:
        return None
    return FusedPlan(plan, operands, form, epilogue, steps)


def same(norm: Norm, other: Norm | None) -> bool:
    """Whether two norms are of the same tensors. Twin in C: `is_norm_of`."""
    return (
        other is not None
        and norm[0] is other[0]
        and norm[1] is other[1]
        and norm[2] is other[2]
        and norm[3] is other[3]
        and norm[4] == other[4]
    )
