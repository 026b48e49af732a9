"""Convolutions of a program, with what follows them. Plans are made at the first calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .... import policy
from ....native import calls as native_calls
from ...conv.convolution import convolve
from ...conv.epilogue import Epilogue, Norm
from ...conv.fused_plan import FusedPlan, fused_plan
from ...conv.kernel_products import BY_PYTHON, OVER_TABLE
from ...conv.plan import ConvForm, run
from ...maps.kernel_map import KernelMap
from .maps import same_rows

_MAP = 3  # its place among a step's operands

OptionalTensor = torch.Tensor | None


class ConvStep:
    """y = act(norm(conv(x) + bias) + residual) without gradients. A call takes x [N_in, C_in] and the weight, bias,
    norm's vectors [C_out] and residual [N_out, C_out], and returns [N_out, C_out] in x's dtype. No map is that of
    every row onto itself.

    transposed: the map is read backwards. Raises what `conv` does.
    """

    __name__ = __qualname__ = "conv"  # in the program that torch writes

    def __init__(self, form: ConvForm, transposed: bool, eps: float, activation: str | None, alpha: float) -> None:
        self.transposed = transposed
        self._form, self._eps, self._activation, self._alpha = form, eps, activation, alpha
        self.plan: FusedPlan | None = None
        self._plans = policy.Attempts(policy.FUSED_PLANS)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: OptionalTensor,
        kmap: KernelMap | None,
        mean: OptionalTensor = None,
        var: OptionalTensor = None,
        gain: OptionalTensor = None,
        beta: OptionalTensor = None,
        residual: OptionalTensor = None,
    ) -> torch.Tensor:
        """Twin in C: `planned`."""
        if kmap is None:
            kmap = same_rows(x, False)
        elif self.transposed:
            kmap = kmap.transposed()
        planned, plan = native_calls.planned, self.plan
        if planned is not None and plan is not None:
            y = planned(plan, x, weight, kmap, bias, mean, var, gain, beta, residual)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        norm = None if mean is None or var is None else Norm(mean, var, gain, beta, self._eps)
        epilogue = Epilogue(bias, self._activation, self._alpha, norm, residual)
        return self._by_python(x, weight, kmap, epilogue)

    def _by_python(self, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue) -> torch.Tensor:
        with torch.no_grad():
            if kmap.x_fold is not None or kmap.y_fold is not None:
                return convolve(x, weight, kmap, epilogue, self._form).contiguous()
            y, plan = run(x, weight, kmap, epilogue, self._form)
        current = self.plan
        if not self._plans.over and (current is None or not current.serves(plan, epilogue)):
            self._plans.due()
            self.plan = fused_plan(plan, (x, weight), self._form, epilogue, "")
        return y.contiguous()


class Link(NamedTuple):
    """A convolution of a chain. operands: places of what its step takes, -1 for none; behind the
    chain's arguments follow the results.  last: the link that reads the result last; -1: others do,
    too."""

    step: ConvStep
    operands: tuple[int, ...]
    last: int


class ChainStep:
    """Convolutions in a row. A call returns the results that others read, [N_out, C_out] each, in x's dtype, as a
    tuple.

    The compiled helper runs those of them that follow each other and whose maps it can bind; one
    that it refuses again and again is left out.  n_args: of a call.  itemsize: bytes of a value of
    all features.
    """

    __name__ = __qualname__ = "chain"

    def __init__(self, links: Sequence[Link], n_args: int, itemsize: int) -> None:
        self._links, self._n_args, self._itemsize = tuple(links), n_args, itemsize
        self._plans: list[FusedPlan | None] = []
        self._runs: list[tuple[range, Any]] = [(range(len(links)), None)]  # links, who runs them
        self._refusals = dict[int, policy.Attempts]()  # by link, of its map or its launch

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Twin in C: `chain_call`."""
        values: list[Any] = [*args, *[None] * len(self._links)]
        refused = False
        for links, helper in self._runs:
            if helper is not None:
                if helper(values) is not NotImplemented:
                    for at in links if self._refusals else ():
                        self._refusals.pop(at, None)
                    continue
                if helper.refused >= 0:
                    self._refuse(links[helper.refused])
            refused = True
            for at in links:
                link = self._links[at]
                operands: Any = [None if i < 0 else values[i] for i in link.operands]
                values[self._n_args + at] = link.step(*operands)
        if refused:
            self._join()
        results = zip(self._links, values[self._n_args :], strict=True)
        return tuple([y for link, y in results if link.last < 0])

    def _refuse(self, at: int) -> None:
        attempts = self._refusals.setdefault(at, policy.Attempts(policy.CHAIN_LINK))
        attempts.failed()
        if attempts.over:
            self._plans = []  # they are joined anew

    def _join(self) -> None:
        """Have the compiled helper run the plans, if they have changed."""
        plans = [link.step.plan for link in self._links]
        if native_calls.helper is None or plans == self._plans:
            return
        for at, (plan, previous) in enumerate(zip(plans, self._plans, strict=False)):
            if plan is not previous:
                self._refusals.pop(at, None)
        runs: list[tuple[range, Any]] = []
        for joined, group in itertools.groupby(range(len(plans)), self._joins):
            links = list(group)
            helper = self._chain(links[0], links[-1] + 1) if joined and len(links) > 1 else None
            runs.append((range(links[0], links[-1] + 1), helper))
        self._runs, self._plans = runs, plans  # each in one assignment: other threads read them

    def _joins(self, at: int) -> bool:
        plan = self._links[at].step.plan
        native, refused = None if plan is None else plan.native, self._refusals.get(at)
        if native is None or native.flow == BY_PYTHON or (refused is not None and refused.over):
            return False
        own = self._links[at].operands[_MAP] < 0
        return not own or bool(native.flow == OVER_TABLE)

    def _chain(self, begin: int, end: int) -> Any:
        steps = tuple(_described(link, begin, end) for link in self._links[begin:end])
        return native_calls.helper.Chain(steps, self._n_args + begin, self._itemsize)


def _described(link: Link, begin: int, end: int) -> tuple[Any, ...]:
    """A link for the compiled helper; links from `end` on are not of its chain."""
    x, weight, bias, kmap, *vectors = link.operands
    plan = link.step.plan
    assert plan is not None
    last = link.last - begin if link.last < end else -1
    head = plan, plan.columns, int(link.step.transposed), last, kmap
    return (*head, x, weight, bias, *vectors)
