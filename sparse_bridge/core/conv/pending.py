"""Convolutions that wait, in inference, for the norm, the sum and the activation behind them.

In the convolution's own store those cost next to nothing. A layer whose last results went on to
them is not launched at its call, but when the last of them has come, or when somebody reads what
lies between. It reads its operands then; an operand that was changed in place meanwhile is an
error that names the change. So only layers wait that have been seen to be followed, and none whose
operands changed meanwhile when it was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ... import settings
from ..device import trace
from ..maps.kernel_map import KernelMap
from . import convolution, fused_call
from .epilogue import Epilogue, Norm
from .history import NOTHING, LayerCall, history_of
from .plan import ConvForm, find, run

Launch = Callable[[torch.Tensor], torch.Tensor]
_READ, _TAKEN = 1, 2
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HALVES = (torch.float16, torch.bfloat16)


_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_on, _generation = True, -1


def _renew() -> None:
    """Ask the settings whether layers may wait."""
    global _on, _generation
    now = settings.generation
    _on = settings.get().optimize != "off"
    _generation = now  # last: other threads go by it


def start(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue,
    form: ConvForm,
) -> torch.Tensor | PendingConv:  # fmt: skip
    """What `convolve_layer` does for results that are large enough, without gradients."""
    if _generation != settings.generation:
        _renew()
    history = history_of(owner) if _on and not trace.recorders else NOTHING
    if history.over or epilogue[1] is not None or epilogue[4] is not None:
        return convolution.convolve(x, weight, kmap, epilogue, form)
    done = "" if epilogue[3] is None else "n"
    target = history.begin(done)
    if not _may_wait(x, weight, kmap, epilogue):
        return convolution.convolve(x, weight, kmap, epilogue, form)
    if torch._C._is_any_autocast_enabled():
        dtype = convolution.autocast_dtype(x.device)
        if dtype is not None and x.dtype is not torch.float64:
            x, weight = x.to(dtype), weight.to(dtype)
    plan = find(x, weight, kmap, epilogue, form)  # whose errors belong here
    shape = kmap.rulebook.n_rows[kmap.flipped], plan.columns_out
    made = PendingConv(LayerCall((x, weight, kmap, form), shape, history, target), epilogue, done)
    operands, count = [x, weight], x._version + weight._version
    if epilogue[0] is not None or done:
        held = [one for one in epilogue.vectors if one is not None]
        operands += held
        count += sum([one._version for one in held])
    made._operands, made._count = operands, count
    if not target:
        made.put(convolution.convolve(x, weight, kmap, epilogue, form))
    return made


def _may_wait(
    x: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue
) -> bool:  # fmt: skip
    """Whether a later launch computes the same, as far as this can be told now."""
    return not (
        type(x) is not torch.Tensor
        or type(weight) not in _PLAIN
        or torch.is_inference_mode_enabled()  # where nobody counts changes
        or x.is_inference()
        or weight.is_inference()
        or (epilogue[0] is not None and epilogue[0].is_inference())
        or kmap.x_fold is not None
        or kmap.y_fold is not None
        or (fused_call.listening and fused_call.busy())
        # Somebody sees every operation, or computes something else by it.
        or _functions()
        or _dispatches()
        or _transforms()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
    )


class PendingConv:
    """A convolution of features that has not been launched, or has been to see what follows it.

    epilogue: what follows so far.  steps: the same in letters.  shape, dtype, device: of the
    result.  result: once it is there.  fallback: while it is found out what follows, what the
    layers compute one by one; the result where operands changed meanwhile.
    """

    __slots__ = (
        "__weakref__",
        "_count",
        "_operands",
        "_used",
        "_version",
        "call",
        "epilogue",
        "fallback",
        "result",
        "steps",
    )  # fmt: skip

    _operands: list[torch.Tensor]  # what the launch will read
    _count: int  # how often those had been changed in place

    def __init__(self, call: LayerCall, epilogue: Epilogue, steps: str) -> None:
        self.call, self.epilogue, self.steps, self._used = call, epilogue, steps, 0
        self.result: torch.Tensor | None = None
        self.fallback: torch.Tensor | None = None
        self._version = 0

    def put(self, result: torch.Tensor) -> None:
        """The result, which is there although it may be of interest what follows."""
        self.result, self._version = result, result._version

    def become(self, result: torch.Tensor) -> None:
        """All who hold it see `result`: what follows was done in place."""
        self.result, self._used = result, _READ

    @property
    def shape(self) -> tuple[int, int]:
        return self.call.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.call.dtype

    @property
    def device(self) -> torch.device:
        return self.call.device

    @property
    def follows(self) -> bool:
        """Whether it is to be found out what comes next, and somebody can still tell."""
        return not self.call.target and self._used == 0 and self.steps[-1:] != "a"

    def read(self) -> torch.Tensor:
        """The result, for whoever looks at it now."""
        if self._used & _TAKEN:
            self.call.history.read(self.steps)
        self._used |= _READ
        return self._launched()

    def _launched(self) -> torch.Tensor:
        if self.result is None:
            self.result = self._unchanged() if self._changed() else self.call.run(self.epilogue)
            self._operands, self.fallback = [], None
        return self.result

    def _changed(self) -> bool:
        count = self._count
        for one in self._operands:
            count -= one._version
        return count != 0

    def _unchanged(self) -> torch.Tensor:
        """The result of operands that were changed since."""
        self.call.history.read("")
        if self.fallback is None:
            raise RuntimeError(
                "features or parameters of a convolution were changed in place between the layer "
                f"and the {_NAMES[self.call.target]} behind it, which are one operation in "
                "inference; copy them before, or set SPARSE_BRIDGE_OPTIMIZE=off."
            )
        return self.fallback

    # what follows: the result, or a pending convolution with one step more

    def normed(self, norm: Norm, otherwise: Launch) -> Following:
        """Behind a norm by fixed statistics; otherwise(result) computes it alone."""
        fits = self._takes(norm)
        if fits and self._goes_on("n"):
            tensors: Any = norm[:4] if norm[2] is not None else norm[:2]
            return self._next("n", Epilogue(self.epilogue[0], None, 0.0, norm), tensors)
        epilogue = Epilogue(self.epilogue[0], None, 0.0, norm) if fits else None
        tensors = [one for one in norm[:4] if one is not None]
        return self._found_out("n", epilogue, tensors, otherwise)

    def _takes(self, norm: Norm) -> bool:
        """Whether torch's batch norm takes these vectors, all of them, for this result."""
        call = self.call
        history = call.history
        known, mine = history.norm, call.dtype
        if (
            known is not None
            and norm[0] is known[0] and norm[1] is known[1] and norm[2] is known[2]
            and norm[3] is known[3] and history.kind == (mine, norm[0].dtype)
        ):  # fmt: skip
            return norm[2] is None or norm[2].dtype is norm[0].dtype
        tensors = [one for one in norm[:4] if one is not None]
        kind, columns, device = norm[0].dtype, (call.shape[1],), call.device
        if len(tensors) == 3 or not (kind is mine or (kind is torch.float32 and mine in _HALVES)):
            return False
        history.norm, history.kind = None, (mine, kind)
        for one in tensors:
            if type(one) not in _PLAIN or one.is_inference():
                return False
            if one.dtype is not kind or one.shape != columns or one.device != device:
                return False
        history.norm = norm
        return True

    def plus(self, other: Any, otherwise: Launch) -> Following:
        """The sum with features of the same shape."""
        call = self.call
        fits = (
            type(other) in _PLAIN
            and other.shape == call.shape
            and other.dtype is call.dtype
            and other.device == call.device
            and not other.is_inference()
        )
        bias, _, _, norm, _ = self.epilogue
        if fits and self._goes_on("s"):
            return self._next("s", Epilogue(bias, None, 0.0, norm, other), (other,))
        epilogue = Epilogue(bias, None, 0.0, norm, other) if fits else None
        return self._found_out("s", epilogue, [other], otherwise)

    def activated(self, name: str, alpha: float, otherwise: Launch) -> Following:
        """Behind an activation of `ACTIVATIONS`."""
        bias, _, _, norm, residual = self.epilogue
        epilogue = Epilogue(bias, name, alpha, norm, residual)
        if self._goes_on("a"):
            return self._next("a", epilogue, ())
        return self._found_out("a", epilogue, [], otherwise)

    def _goes_on(self, step: str) -> bool:
        """Whether this is the step that the layer waits for."""
        call, at = self.call, len(self.steps)
        return (
            self._used == 0
            and call.target[at : at + 1] == step
            and self.result is None
            and not (
                torch.is_grad_enabled()
                or torch.is_inference_mode_enabled()
                or _functions()
                or _dispatches()
            )
            and (call.stream < 0 or call.here())
        )

    def _undisturbed(self) -> bool:
        return (
            not (
                torch.is_grad_enabled()
                or torch.is_inference_mode_enabled()
                or _functions()
                or _dispatches()
            )
            and self.call.here()
        )

    def _next(self, step: str, epilogue: Epilogue, operands: Any) -> Following:
        call, steps = self.call, self.steps + step
        self._used, call.history.seen = _TAKEN, steps
        if steps == call.target:  # the last one
            if self._changed():
                self._unchanged()
            x, weight, kmap, form = call.given
            return run(x, weight, kmap, epilogue, form)[0]
        made = PendingConv(call, epilogue, steps)
        made._operands, count = [*self._operands, *operands], self._count
        for one in operands:
            count += one._version
        made._count = count
        return made

    def _found_out(
        self, step: str, epilogue: Epilogue | None, operands: list[Any], otherwise: Launch
    ) -> Following:
        """A step that nobody waited for."""
        call, steps = self.call, self.steps + step
        if steps in _NAMES and self._used:
            call.history.read(self.steps)
        elif steps in _NAMES and epilogue is not None and not call.target and self._undisturbed():
            if not (self._changed() or self._overwritten()):
                return self._tried(step, epilogue, operands, otherwise)
            call.history.read(self.steps)
        self._used |= _READ
        return otherwise(self._launched())

    def _overwritten(self) -> bool:
        return self.result is not None and self.result._version != self._version

    def _tried(
        self, step: str, epilogue: Epilogue, operands: list[Any], otherwise: Launch
    ) -> Following:
        """A step that may be waited for at the next call."""
        alone = self.result if self.fallback is None else self.fallback
        assert alone is not None
        made = PendingConv(self.call, epilogue, self.steps + step)
        made._operands = [*self._operands, *operands]
        made._count = self._count + sum([one._version for one in operands])
        made.fallback = otherwise(alone)
        self._used, self.call.history.seen = _TAKEN, made.steps
        if step == "a":
            return made._launched()
        return made

    def __reduce_ex__(self, version: Any) -> Any:
        """Copies know nothing of what follows."""
        return _nothing, ()


Following = torch.Tensor | PendingConv


def _nothing() -> None:
    return None


_NAMES = {
    "": "layers behind it", "n": "norm", "s": "sum", "a": "activation", "ns": "norm and sum",
    "na": "norm and activation", "sa": "sum and activation",
    "nsa": "norm, sum and activation",
}  # fmt: skip


convolution.waiting = start
