"""Plans: what a layer's call decides once, but for its map, and finds again by one look-up.

The key holds everything that the decisions depend on: dtypes, devices, shape and strides of the
weight, how it is read, precision, and what follows the sum. Settings, verdicts of the self-check
and the order of automatic dataflows choose the set of plans in which it is looked up. What may
change from call to call, rows and the map, is compared at every call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ... import memory, policy, settings, state
from ...native import calls as native_calls
from ..device import precision, selection, self_check, trace
from ..device.torch_compat import allows_fp16_sums
from ..geometry.weights import fills_its_memory, gradient_like, is_read_as_copy, layout_of
from ..maps.kernel_map import KernelMap
from . import override, registry
from .checks import check, check_devices, like_result
from .dataflow import Case, Gather, LayerProduct, Wgrad, of_copy
from .epilogue import Epilogue

_NOTHING = Epilogue()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ConvForm(NamedTuple):
    """How a layer reads its weight ("vio" or "ovi", see `layout_of`; groups) and multiplies: "ieee"
    or "tf32" for fp32, "half" for fp16 with leave to add up in fp16, "wide" for fp16 without, whatever
    torch's switch says.  dataflow: what its module was given, "" for nothing.
    """

    layout: str = "vio"
    groups: int = 1
    precision: str = "ieee"
    dataflow: str = ""


class ConvPlan:
    """A convolution that has passed all checks that do not need the map, with its three products.

    key: under which it is found.  product, forward: see `Dataflow`.  w: how the weight is read.  separate: values of
    a bias or of a norm's vectors are not next to each other.  generation: of the settings when it was last found.
    """

    __slots__ = (
        "_dense",
        "_dgrad",
        "_wgrad",
        "case",
        "columns_in",
        "columns_out",
        "dataflow",
        "form",
        "forward",
        "generation",
        "key",
        "n_offsets",
        "product",
        "separate",
        "w",
    )

    def __init__(self, key: Any, case: Case, form: ConvForm, product: LayerProduct, separate: bool) -> None:
        self.key, self.case, self.form, self.w, self.separate = key, case, form, product.w, separate
        self.n_offsets, self.columns_in, self.columns_out = self.w.n_offsets, self.w.columns_in, self.w.columns_out
        self.dataflow = registry.choose(case, form.dataflow)
        requested = precision.requested_precision(product.dtype, form.precision)
        self.product = product._replace(target=self.dataflow.target(case), precision=requested)
        self.forward: Gather = self.dataflow.gather(self.product)
        if memory.limit is not None:
            from .row_blocks.product import LimitedProduct

            self.forward = LimitedProduct(self.dataflow, self.product, self.forward)
        self.generation = settings.generation
        self._dense: bool | None = None
        self._dgrad: dict[bool, Gather] = {}
        self._wgrad: dict[torch.dtype, Wgrad] = {}

    @property
    def lasts(self) -> bool:
        """Whether the settings alone chose the target. CPU tensors take compiled kernels only as
        long as Triton has a driver for those."""
        target = self.product.target
        return target is None or target.raw or target.backend == "interpreter"

    def again(self) -> ConvPlan:
        """The same under the settings in force."""
        return type(self)(self.key, self.case, self.form, self.product, self.separate)

    def dgrad(self, backwards: bool = False) -> Gather:
        """backwards: of a map whose offsets count from the last one."""
        gather = self._dgrad.get(backwards)
        if gather is None:
            w = self.w.transposed()
            back = LayerProduct(*self.product[:4], w.reversed() if backwards else w)
            gather = self._dgrad[backwards] = self.dataflow.gather(back)
        return gather

    def wgrad(self, dw: torch.Tensor, like_weight: bool) -> Wgrad:
        """wgrad into memory like `dw`, [V, C_in / groups, C_out] or as the weight lies, any float dtype.
        like_weight: it lies as the weight does."""
        if not like_weight:
            w = layout_of(dw, self.form.layout, self.form.groups)
            return self.dataflow.wgrad(self.product._replace(w=w), dw.dtype)
        wgrad = self._wgrad.get(dw.dtype)
        if wgrad is None:
            wgrad = self._wgrad[dw.dtype] = self.dataflow.wgrad(self.product, dw.dtype)
        return wgrad

    def gradient_like(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weights.gradient_like`."""
        if self._dense is None:  # whether new memory like the weight's has its strides, too
            self._dense = fills_its_memory(weight)
        if self._dense and type(weight) in _PLAIN:
            return torch.empty_like(weight, dtype=dtype)
        return gradient_like(weight, dtype)

    def gradients(
        self,
        kmap: KernelMap,
        x: torch.Tensor,
        weight: torch.Tensor,
        dy: torch.Tensor,
        dw: torch.Tensor | None,
        wants_x: bool,
    ) -> torch.Tensor | None:
        """dx [N_in, C_in] in x's dtype if it is wanted, else None; dw written where it is given. dy: [N_out, C_out]."""
        rulebook, side = kmap.rulebook, int(kmap.flipped)
        if not (rulebook.n_rows[0] and rulebook.n_rows[1]):
            if dw is not None:
                dw.zero_()
            return x.new_zeros(x.shape) if wants_x else None
        like_weight = dw is None or dw.stride() == weight.stride()
        back, dx = rulebook.backward, None
        if dw is not None and wants_x and like_weight and self.dataflow.joint and back is None:
            return self.dataflow.gradients(self.product, kmap, x, weight, dy, dw)
        if wants_x and back is not None:
            dgrad_rulebook, rows = back.rulebook, back.rows(dy)
            dx = self.dgrad(back.backwards)(dgrad_rulebook, 0, rows, weight, _NOTHING)
        elif wants_x:
            dx = self.dgrad()(rulebook, 1 - side, dy, weight, _NOTHING)
        if dw is not None:
            self.wgrad(dw, like_weight)(rulebook, side, x, dy, dw)
        return dx


class CopyingPlan(ConvPlan):
    """A plan whose products read a copy of the weight, made at every call: see `is_read_as_copy`."""

    __slots__ = ()

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.forward = of_copy(self.forward)

    def gradients(self, kmap: KernelMap, x: Any, weight: Any, dy: Any, dw: Any, wants_x: bool) -> Any:
        """`ConvPlan.gradients` by the copy."""
        near = weight.contiguous()
        own = None if dw is None else torch.empty_like(near, dtype=dw.dtype)
        dx = super().gradients(kmap, x, near, dy, own, wants_x)
        if dw is not None:
            dw.copy_(own)
        return dx


class _Plans:
    """The plans of a process, a set for each of the last settings."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sets: dict[Any, dict[Any, ConvPlan]] = {}
        self.plans: dict[Any, ConvPlan] = {}  # under the settings in force, at `generation`
        self.generation = -1

    def renew(self) -> None:
        """Turn to the plans under the settings in force."""
        self.generation = settings.generation
        besides = memory.limit, self_check.generation, registry.automatic(), precision.fp16_sums
        self.plans = self._sets.pop(under := (settings.get(), *besides, selection.stand_in()), {})
        if len(self._sets) >= policy.PLAN_SETTINGS:
            del self._sets[next(iter(self._sets))]  # least recently used
        self._sets[under] = self.plans

    def put(self, plan: ConvPlan) -> None:
        if len(self.plans) >= policy.PLANS:
            self.plans.clear()
        self.plans[plan.key] = plan

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))


known_plans = _Plans()
reset, count = state.owns(known_plans.reset), known_plans.__len__


def plans() -> list[ConvPlan]:
    """The plans under the last settings that were in force."""
    return list(known_plans.plans.values())


def _key_of(epilogue: Epilogue) -> tuple[Any, ...] | None:
    """All but the values, and the residual's shape."""
    bias, activation, alpha, norm, residual = epilogue
    key: tuple[Any, ...] | None = None
    if bias is not None:
        key = (bias.dtype, bias.device, bias.shape, bias.stride())
    if activation is not None or norm is not None:
        key = (key, activation, alpha)
    if norm is not None:
        mean, var, gain, beta, eps = norm
        key = (
            key,
            eps,
            mean.dtype,
            mean.device,
            mean.shape,
            mean.stride(),
            var.dtype,
            var.device,
            var.shape,
            var.stride(),
        )
        if gain is not None:
            key = (key, gain.dtype, gain.device, gain.shape, gain.stride())
        if beta is not None:
            key = (key, 0, beta.dtype, beta.device, beta.shape, beta.stride())
    return key if residual is None else (key, True)


def find(x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm) -> ConvPlan:
    """The plan of a convolution of x [N_in, C_in], fp16 / bf16 / fp32 / fp64 like the weight, over distinct rows,
    made now unless it is known.

    Raises: ShapeError, DataTypeError, DeviceError, OverflowLimitError, UnsupportedError. Twin in C: `plan_key`.
    """
    if allows_fp16_sums() is not precision.fp16_sums:
        precision.follow_torch()
    if known_plans.generation != settings.generation:
        known_plans.renew()
    if override.inside:
        form = form._replace(dataflow=override.current() or form.dataflow)
    rulebook, bias = kmap.rulebook, epilogue[0]
    end: tuple[Any, ...] | None = None
    if epilogue[1] is not None or epilogue[3] is not None or epilogue[4] is not None:
        end = _key_of(epilogue)
    elif bias is not None:
        end = (bias.dtype, bias.device, bias.shape, bias.stride())
    key = (x.dtype, x.device, weight.dtype, weight.device, weight.shape, weight.stride(), form, end, rulebook.regular)
    plan = known_plans.plans.get(key)
    if plan is not None:
        shape = x.shape
        if (
            len(shape) == 2
            and shape[1] == plan.columns_in
            and shape[0] == rulebook.n_rows[not kmap.flipped]
            and rulebook.n_offsets == plan.n_offsets
            and rulebook.device == plan.case.device
        ):
            return plan
    check_devices(x, weight, epilogue.bias, kmap)
    w = check(x, weight, epilogue, kmap, layout_of(weight, form.layout, form.groups))
    case = Case(x.device, x.dtype, rulebook.regular)
    product = LayerProduct(None, x.device, x.dtype, form.precision, w, epilogue.form)
    vectors = [vector for vector in epilogue.vectors[:5] if vector is not None]
    separate = any(not vector.is_contiguous() for vector in vectors)
    plan = (CopyingPlan if is_read_as_copy(weight, form.layout) else ConvPlan)(key, case, form, product, separate)
    if plan.lasts:
        known_plans.put(plan)
    return plan


def present(plan: ConvPlan) -> ConvPlan:
    """The plan of the same convolution under the settings in force."""
    if plan.generation == settings.generation:
        return plan
    if known_plans.generation != settings.generation:
        known_plans.renew()
    current = known_plans.plans.get(plan.key)
    if current is None:
        current = plan.again()
        if current.lasts:
            known_plans.put(current)
    current.generation = settings.generation
    return current


class GradientRequest(NamedTuple):
    """Which gradients of a convolution: of x, and of the weight in this dtype."""

    x: bool
    weight: torch.dtype | None


def backward(
    plan: ConvPlan, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, request: GradientRequest
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [N_in, C_in] in x's dtype, dw laid out as the weight, in dtype `request.weight`), under the settings in
    force; None for one that is not requested. dy: contiguous, [N_out, C_out] in x's dtype. Twin in C: `gradients`."""
    if (native := native_calls.gradients) is not None:
        grads: Any = native(plan, kmap, x, weight, dy, request.x, request.weight)
        if grads is not NotImplemented:
            return grads  # type: ignore[no-any-return]
    plan = present(plan)
    dw = None if request.weight is None else plan.gradient_like(weight, request.weight)
    return plan.gradients(kmap, x, weight, dy, dw, request.x), dw


def run(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> tuple[torch.Tensor, ConvPlan]:
    """(act(norm(conv + bias) + residual) [N_out, C_out] in x's dtype, the plan). Raises: what `find` does, and
    ShapeError, DataTypeError, DeviceError for a residual unlike the result. Twin in C: `run_plain`."""
    bias, activation, _, norm, residual = epilogue
    if (native := native_calls.run_plain) is not None and activation is None and norm is None and residual is None:
        result: Any = native(x, weight, bias, kmap, form)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    plan = find(x, weight, kmap, epilogue, form)
    return run_plan(plan, x, weight, kmap, epilogue), plan


def run_plan(
    plan: ConvPlan, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue
) -> torch.Tensor:
    """The result [N_out, C_out] of a convolution whose plan this is, in x's dtype."""
    rulebook, side = kmap.rulebook, int(kmap.flipped)
    if epilogue.residual is not None:
        shape = rulebook.n_rows[side], plan.columns_out
        residual = like_result(epilogue.residual, shape, x.dtype, x.device)
        epilogue = epilogue._replace(residual=residual)
    if rulebook.n_rows[0] and rulebook.n_rows[1]:
        if plan.separate:
            epilogue = epilogue.contiguous()
        y = plan.forward(rulebook, side, x, weight, epilogue)
    else:
        y = x.new_zeros((rulebook.n_rows[side], plan.columns_out))
        y = epilogue.finish(y, x.dtype)
    if trace.recorders:
        served = plan.dataflow.serves(rulebook, side, plan.product)
        trace.emit("conv", served, kmap, plan.columns_in, plan.columns_out)
        trace.show(plan, weight, kmap)
    return y
