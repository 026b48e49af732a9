"""What followed the results of modules, by module; and calls of layers whose launch may come later,
with what follows, as far as the epilogue of their convolution can apply it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ... import policy, state
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
    """What followed the results of one module: a layer, or a norm in training that takes sparse
    tensors, whose only step is the activation.

    seen: the steps behind the last result so far.  most: how many of them may be waited for;
    behind those somebody else reads, too.  alone: calls that nothing followed.  disabled: nothing
    is to be waited for any more.  plan: by which the next call may be launched with what will
    follow; launches: attempts at that, which fail where something else does.  whole: the same of
    calls that say themselves what follows; plans: of those.  norm_calls: in training, whose results
    tell which norm takes them.
    """

    __slots__ = ("alone", "disabled", "launches", "most", "norm_calls", "plan", "plans", "seen", "whole")

    def __init__(self) -> None:
        self.plan: FusedPlan | None = None
        self.seen, self.most, self.alone, self.disabled = "", len(STEPS), 0, False
        self.launches, self.plans = policy.Attempts(policy.EARLY_LAUNCHES), policy.Attempts(policy.FUSED_PLANS)
        self.whole: FusedPlan | None = None
        self.norm_calls = policy.Attempts(policy.NORM_CALLS)

    def begin(self, done: str) -> str:
        """The steps that the next result waits for, of which `done` are part of the call; "" to
        find out."""
        expected, self.seen = self.seen[: self.most], done
        if expected.startswith(done) and len(expected) > len(done):
            self.alone = 0
            return expected
        self.alone += 1
        self.disabled = self.alone > policy.CALLS_ALONE
        return ""

    def read(self, steps: str) -> None:
        """Somebody reads what `steps` made, which is followed."""
        if len(steps) < self.most:
            self.most, self.disabled, self.plan = len(steps), not steps, None

    def keep(self, plan: FusedPlan | None) -> None:
        """For the next call, unless such plans have been for nothing too often."""
        self.plan = None if self.launches.over else plan


DISABLED = History()  # of layers that are not to wait
DISABLED.disabled = True

histories: dict[int, tuple[weakref.ref[Any], History]] = {}


def history_of(owner: Any) -> History:
    """Of a module or a layer's weight, as long as that lives."""
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
    """What all steps behind one call of a layer share.

    target: the steps that are waited for.  fused: by which it is launched before the last of them
    has come; then between: bias and norm, changes: of the norm's vectors at the call, launched:
    what the steps will have made of it.
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
        """Whether what is computed now is what would have been computed at the call."""
        return not (
            torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or _functions()
            or _dispatches()
            or (self.stream >= 0 and not self.here())
        )

    def discard_launch(self) -> None:
        """Other steps have come than it was launched with."""
        if self.launched is not None:
            self.history.launches.failed()
            if self.history.launches.over:
                self.history.plan = None
        self.fused = self.launched = None

    def take_launched(self) -> torch.Tensor:
        """What was launched, [N_out, C_out] in the call's dtype, once all steps have come. It is handed out once."""
        y = self.launched
        assert y is not None
        self.launched = None
        return y

    def here(self) -> bool:
        """Whether the stream of the call is the current one."""
        stream = self.stream
        return stream < 0 or torch._C._cuda_getCurrentRawStream(self.device.index) == stream

    def run(self, epilogue: Epilogue) -> torch.Tensor:
        """Launch it: [N_out, C_out] in the call's dtype. The current stream waits for that of the call, if it is
        another one. For errors see `plan.run`."""
        x, weight, kmap, form = self.operands
        if not self.here():  # the layer's own stream, for which this one waits
            there = torch.cuda.ExternalStream(self.stream, x.device)
            with torch.cuda.stream(there):
                y = self.run(epilogue)
            torch.cuda.current_stream(x.device).wait_stream(there)
            return y
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return run(x, weight, kmap, epilogue, form)[0]
        return run(x, weight, kmap, epilogue, form)[0]


def changes_of(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> int:
    """How often what a launch reads, tensors of any shape and dtype, has been changed in place."""
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
    """Whether somebody sees every operation, or computes something else by it."""
    return bool(
        _functions()
        or _dispatches()
        or _transforms()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
    )


def may_wait(x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue) -> bool:
    """Whether a later launch computes the same, as far as this can be told now. x: [N_in, C_in]; x and the weight
    are of any dtype. Subclasses of tensors and inference tensors may not wait."""
    return not (
        type(x) is not torch.Tensor
        or type(weight) not in PLAIN
        or x.is_inference()
        or weight.is_inference()
        or (epilogue[0] is not None and epilogue[0].is_inference())
        or kmap.x_fold is not None
        or kmap.y_fold is not None
        or override.wait_for_nothing()
        or watched()
    )
