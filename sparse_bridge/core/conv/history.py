"""Which steps (norm, sum, activation) followed the results of each module, and calls of layers whose launch is
deferred until those steps are known, so that the convolution's epilogue applies them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ... import policy, state
from ..device.selection import stands_in
from ..maps.kernel_map import KernelMap
from . import override
from .epilogue import STEPS, Epilogue, Norm
from .plan import ConvForm, run

if TYPE_CHECKING:
    from .fused_plan import FusedPlan

PLAIN = (torch.Tensor, torch.nn.Parameter)
_HALVES = (torch.float16, torch.bfloat16)
_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


class History:
    """The steps that followed the results of one module. The module is a layer, or a norm in training that takes
    sparse tensors, whose only step is the activation.

    seen: letters of `STEPS`, those behind the last result so far.  most: how many steps may be deferred; other code
    reads the result of the last one, too.  alone: calls without a step behind them.  disabled: no call is deferred any
    more.  plan: launches the next call together with its steps.  launches: attempts at that; one fails where another
    step comes.  full_plan: of calls whose epilogue is complete.  plans: attempts at those.  norm_calls: attempts in
    training to learn which norm takes the result.
    """

    __slots__ = ("alone", "disabled", "full_plan", "launches", "most", "norm_calls", "plan", "plans", "seen")

    def __init__(self) -> None:
        self.plan: FusedPlan | None = None
        self.seen, self.most, self.alone, self.disabled = "", len(STEPS), 0, False
        self.launches, self.plans = policy.Attempts(policy.EARLY_LAUNCHES), policy.Attempts(policy.FUSED_PLANS)
        self.full_plan: FusedPlan | None = None
        self.norm_calls = policy.Attempts(policy.NORM_CALLS)

    def begin(self, included: str) -> str:
        """The steps that the next call is deferred to; "" where the call is to find out which follow.

        included: the steps that the call itself computes."""
        expected, self.seen = self.seen[: self.most], included
        if expected.startswith(included) and len(expected) > len(included):
            self.alone = 0
            return expected
        self.alone += 1
        self.disabled = self.alone > policy.CALLS_ALONE
        return ""

    def read(self, steps: str) -> None:
        """Other code reads the result of `steps`, behind which more steps come."""
        if len(steps) < self.most:
            self.most, self.disabled, self.plan = len(steps), not steps, None

    def keep(self, plan: FusedPlan | None) -> None:
        """Use the plan for the next call, unless launches by plans were discarded too often."""
        self.plan = None if self.launches.over else plan


DISABLED = History()  # of layers that are not deferred
DISABLED.disabled = True

histories: dict[int, tuple[weakref.ref[Any], History]] = {}


def history_of(owner: Any) -> History:
    """The history of a module or of a layer's weight; it lives as long as its owner."""
    key = id(owner)
    entry = histories.get(key)
    if entry is not None and entry[0]() is owner:
        return entry[1]
    history = History()

    def forget(gone: weakref.ref[Any]) -> None:
        entry = histories.get(key)
        if entry is not None and entry[0] is gone:
            del histories[key]

    histories[key] = weakref.ref(owner, forget), history
    return history


@state.owns
def reset() -> None:
    """Forget what followed every module."""
    histories.clear()


class LayerCall:
    """The data that all steps behind one call of a layer share.

    target: letters of the steps that the launch is deferred to.  fused: the plan by which it is launched before the
    last step has come; None otherwise.  With a plan, between: bias and norm; changes: version counters of the norm's
    vectors at the call; launched: the result behind all steps.
    """

    __slots__ = (
        "between",
        "changes",
        "device",
        "dtype",
        "fused",
        "history",
        "launched",
        "operands",
        "shape",
        "stream",
        "target",
    )

    between: Epilogue
    changes: int

    def __init__(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, KernelMap, ConvForm],
        shape: tuple[int, int],
        history: History,
        target: str,
    ) -> None:
        self.operands, self.shape, self.history, self.target = operands, shape, history, target
        self.fused: FusedPlan | None = None
        self.launched: torch.Tensor | None = None
        x = operands[0]
        self.dtype, self.device, self.stream = x.dtype, x.device, -1
        if x.is_cuda:
            self.stream = torch._C._cuda_getCurrentRawStream(self.device.index)

    def takes(self, norm: Norm) -> bool:
        """Whether torch's batch norm takes these vectors, all of them, for this result."""
        tensors, mine = [vector for vector in norm[:4] if vector is not None], self.dtype
        dtype, columns = norm[0].dtype, (self.shape[1],)
        if len(tensors) == 3 or not (dtype is mine or (dtype is torch.float32 and mine in _HALVES)):
            return False
        return all(
            type(vector) in PLAIN
            and not vector.is_inference()
            and vector.dtype is dtype
            and vector.shape == columns
            and vector.device == self.device
            for vector in tensors
        )

    def undisturbed(self) -> bool:
        """Whether what is computed now is what would have been computed at the call. Twin in C: `following`."""
        return not (
            torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or _functions()
            or (_dispatches() and not stands_in())
            or (self.stream >= 0 and not self.on_own_stream())
        )

    def discard_launch(self) -> None:
        """Forget the launch: other steps came than it was launched with."""
        if self.launched is not None:
            self.history.launches.failed()
            if self.history.launches.over:
                self.history.plan = None
        self.fused = self.launched = None

    def take_launched(self) -> torch.Tensor:
        """The launched result [N_out, C_out] in the call's dtype, once all steps have come. It can be taken once.

        Twin in C: `taken`.
        """
        y = self.launched
        assert y is not None
        self.launched = None
        return y

    def on_own_stream(self) -> bool:
        """Whether the stream of the call is the current one."""
        stream = self.stream
        return stream < 0 or torch._C._cuda_getCurrentRawStream(self.device.index) == stream

    def run(self, epilogue: Epilogue) -> torch.Tensor:
        """Launch it: [N_out, C_out] in the call's dtype. The current stream waits for that of the call, if it is
        another one. For errors see `plan.run`."""
        x, weight, kmap, form = self.operands
        if not self.on_own_stream():  # the layer's own stream, for which this one waits
            own_stream = torch.cuda.ExternalStream(self.stream, x.device)
            with torch.cuda.stream(own_stream):
                y = self.run(epilogue)
            torch.cuda.current_stream(x.device).wait_stream(own_stream)
            return y
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return run(x, weight, kmap, epilogue, form)[0]
        return run(x, weight, kmap, epilogue, form)[0]


def changes_of(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> int:
    """How often what a launch reads, tensors of any shape and dtype, has been changed in place. Twin in C: `plus`."""
    bias, _, _, norm, residual = epilogue
    count = x._version + weight._version
    if bias is not None:
        count += bias._version
    if norm is not None:
        count += changes(norm)
    if residual is not None:
        count += residual._version
    return count


def changes(norm: Norm) -> int:
    """How often its vectors have been changed in place."""
    mean, var, weight, bias, _ = norm
    count = mean._version + var._version
    if weight is not None:
        count += weight._version
    if bias is not None:
        count += bias._version
    return count


def watched() -> bool:
    """Whether a mode, a transform or a tracer sees every operation."""
    return bool(
        _functions()
        or (_dispatches() and not stands_in())
        or _transforms()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
    )


def may_defer(x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue) -> bool:
    """Whether a later launch computes the same, as far as this can be told now. x: [N_in, C_in]; x and the weight
    are of any dtype. Those of subclasses of tensors and of inference tensors may not be deferred."""
    return not (
        type(x) is not torch.Tensor
        or type(weight) not in PLAIN
        or x.is_inference()
        or weight.is_inference()
        or (epilogue[0] is not None and epilogue[0].is_inference())
        or kmap.x_fold is not None
        or kmap.y_fold is not None
        or override.launches_at_once()
        or watched()
    )
