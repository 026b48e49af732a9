"""Deferred convolutions: those of layers in inference that are launched with the norm, the sum and the activation
behind them.

In the convolution's own store those cost next to nothing. A layer whose last results went on to such steps is not
launched at its call. It is launched when the last step has come, or when other code reads a result in between.
It reads its operands then; an operand that was changed in place meanwhile is an error that names the change.
So a layer is deferred only after a call that such steps followed without a change of its operands. Once it was,
its next call is launched at once with those steps (`fused_plan`). It is deferred again only where they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .... import state
from ....native import calls as native_calls
from ...device.torch_compat import eagerly
from ..epilogue import STEP_ACTIVATION, STEP_NORM, STEP_SUM, STEPS, Epilogue, Norm
from ..fused_plan import fused_plan, same
from ..history import PLAIN, LayerCall, changes, changes_of
from ..plan import run

Launch = Callable[[torch.Tensor], torch.Tensor]
tries = 0  # steps that were learnt by computing a layer twice: alone, and with the step
_READ, _TAKEN = 1, 2


@state.owns
def reset() -> None:
    """Forget how many steps were tried."""
    global tries
    tries = 0


class DeferredConv:
    """A convolution of features that was not launched yet, or was launched to learn which steps follow it.

    epilogue: the steps so far.  steps: their letters.  shape, dtype, device: of the result.  result: None until it is
    computed.  fallback: the result of the layers one by one, while the steps are being learnt; it is the result where
    operands changed meanwhile.
    """

    __slots__ = ("__weakref__", "_count", "_used", "_version", "call", "epilogue", "fallback", "result", "steps")

    # count: how often what the launch reads had been changed in place
    def __init__(self, call: LayerCall, epilogue: Epilogue, steps: str, count: int) -> None:
        self.call, self.epilogue, self.steps = call, epilogue, steps
        self._used, self._count = 0, count
        self.result: torch.Tensor | None = None
        self.fallback: torch.Tensor | None = None
        self._version = 0

    def keep_result(self, result: torch.Tensor) -> None:
        """Keep the result [N_out, C_out] of its dtype, computed at the call to learn which steps follow."""
        self.result, self._version = result, result._version

    def replace_result(self, result: torch.Tensor) -> None:
        """Show `result` [N_out, C_out] of the same dtype to all holders: the next step worked in place."""
        self.result, self._used = result, _READ

    @property
    def shape(self) -> tuple[int, int]:
        """(N_out, C_out) of the result."""
        return self.call.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.call.dtype

    @property
    def device(self) -> torch.device:
        """Of the result."""
        return self.call.device

    @property
    def follows(self) -> bool:
        """Whether the next step is still to be learnt, and can be."""
        return not self.call.target and self._used == 0 and self.steps[-1:] != STEP_ACTIVATION

    @eagerly
    def materialize(self) -> torch.Tensor:
        """The result [N_out, C_out] in its dtype, for whoever looks at it now; launched unless it is there."""
        if self._used & _TAKEN:
            self.call.history.read(self.steps)
        self._used |= _READ
        return self._launched()

    def _launched(self) -> torch.Tensor:
        if self.result is None:
            self.call.discard_launch()
            self.result = self._unchanged() if self._changed() else self.call.run(self.epilogue)
            self.fallback = None
        return self.result

    def _changed(self) -> bool:
        x, weight, _, _ = self.call.operands
        return changes_of(x, weight, self.epilogue) != self._count

    def _unchanged(self) -> torch.Tensor:
        """The result where operands changed since the call; raises where there is no fallback."""
        self.call.history.read("")
        if self.fallback is None:
            raise RuntimeError(
                "features or parameters of a convolution were changed in place between the layer "
                f"and the {_NAMES[self.call.target]} behind it, which are one operation in "
                "inference; copy them before, or set SPARSE_BRIDGE_OPTIMIZE=off."
            )
        return self.fallback

    # each step returns the result, or a deferred convolution with one step more

    @eagerly
    def normed(self, norm: Norm, otherwise: Launch) -> MaybeDeferred:
        """Behind a norm with fixed statistics; otherwise(result) computes the norm alone."""
        call = self.call
        if call.fused is not None:
            if same(norm, call.between[3]) and (result := self.as_launched(norm)) is not None:
                return result
            call.discard_launch()
        fits = call.takes(norm)
        epilogue = Epilogue(self.epilogue[0], None, 0.0, norm) if fits else None
        tensors = [vector for vector in norm[:4] if vector is not None]
        if epilogue is not None and self._is_expected(STEP_NORM):
            return self._next(STEP_NORM, epilogue, tensors)
        return self._unexpected(STEP_NORM, epilogue, tensors, otherwise)

    @eagerly
    def as_launched(self, norm: Norm) -> MaybeDeferred | None:
        """Behind the norm of its plan; None where norm or mode have changed. Twin in C: `normalised`."""
        if (native := native_calls.normalised) is not None:
            result = native(norm, self)
            if result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        call = self.call
        if self._used or self.steps or changes(norm) != call.changes or not call.undisturbed():
            return None
        call.history.seen, self._used = STEP_NORM, _TAKEN
        if call.target == STEP_NORM:
            return call.take_launched()
        return DeferredConv(call, call.between, STEP_NORM, self._count + call.changes)

    @eagerly
    def plus(self, other: Any, otherwise: Launch) -> MaybeDeferred:
        """The sum with features of the same shape. Twin in C: `plus`."""
        if (native := native_calls.plus) is not None:
            result = native(self, other)
            if result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        call = self.call
        fits = (
            type(other) in PLAIN
            and other.shape == call.shape
            and other.dtype is call.dtype
            and other.device == call.device
            and not other.is_inference()
        )
        bias, _, _, norm, _ = self.epilogue
        epilogue = Epilogue(bias, None, 0.0, norm, other) if fits else None
        if epilogue is None or not self._is_expected(STEP_SUM):
            return self._unexpected(STEP_SUM, epilogue, [other], otherwise)
        if call.fused is None or self._changed():
            return self._next(STEP_SUM, epilogue, (other,))
        y = call.fused.launch(call.operands, call.between[0], other.contiguous())
        steps = self.steps + STEP_SUM
        self._used, call.history.seen = _TAKEN, steps
        if steps == call.target:
            return y
        call.launched = y
        return DeferredConv(call, epilogue, steps, self._count + other._version)

    @eagerly
    def end_launched(self, name: str, alpha: float) -> torch.Tensor | None:
        """Behind the activation with which it was launched: [N_out, C_out] in its dtype; None where another one
        comes. Twin in C: `activated`."""
        if (native := native_calls.activated) is not None:
            result = native(self, name, alpha)
            if result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        call = self.call
        if (
            call.launched is None
            or self._used
            or self.steps + STEP_ACTIVATION != call.target
            or call.fused is None
            or call.fused.activation != (name, alpha)
            or not call.undisturbed()
        ):
            return None
        call.history.seen, self._used = call.target, _TAKEN
        return call.take_launched()

    @eagerly
    def activated(self, name: str, alpha: float, otherwise: Launch) -> MaybeDeferred:
        """Behind an activation of `ACTIVATIONS`."""
        result = self.end_launched(name, alpha)
        if result is not None:
            return result
        bias, _, _, norm, residual = self.epilogue
        epilogue = Epilogue(bias, name, alpha, norm, residual)
        if self._is_expected(STEP_ACTIVATION):
            return self._next(STEP_ACTIVATION, epilogue, ())
        return self._unexpected(STEP_ACTIVATION, epilogue, [], otherwise)

    def _is_expected(self, step: str) -> bool:
        """Whether this is the step that the layer is deferred to. Twin in C: `following`."""
        call, at = self.call, len(self.steps)
        return self._used == 0 and call.target[at : at + 1] == step and self.result is None and self.call.undisturbed()

    def _next(self, step: str, epilogue: Epilogue, operands: Any) -> MaybeDeferred:
        call, steps = self.call, self.steps + step
        self._used, call.history.seen = _TAKEN, steps
        if steps == call.target:  # the last one
            if self._changed():
                self._unchanged()
            x, weight, kmap, form = call.operands
            y, plan = run(x, weight, kmap, epilogue, form)
            call.history.keep(fused_plan(plan, (x, weight), form, epilogue, steps))
            return y
        return DeferredConv(call, epilogue, steps, self._count + sum([operand._version for operand in operands]))

    def _unexpected(
        self, step: str, epilogue: Epilogue | None, operands: list[Any], otherwise: Launch
    ) -> MaybeDeferred:
        """A step that the launch is not deferred to."""
        call, steps = self.call, self.steps + step
        if self._used & _TAKEN or (self._used and steps in _NAMES):
            call.history.read(self.steps)
        elif steps in _NAMES and epilogue is not None and not call.target and self.call.undisturbed():
            if not (self._changed() or self._overwritten()):
                return self._try_step(step, epilogue, operands, otherwise)
            call.history.read(self.steps)
        self._used |= _READ
        return otherwise(self._launched())

    def _overwritten(self) -> bool:
        return self.result is not None and self.result._version != self._version

    def _try_step(self, step: str, epilogue: Epilogue, operands: list[Any], otherwise: Launch) -> MaybeDeferred:
        """Compute a step alone and with the convolution, so that the next call may be deferred to it."""
        global tries
        tries += 1
        alone = self.result if self.fallback is None else self.fallback
        assert alone is not None
        if step == STEP_NORM and epilogue.norm is not None:
            norm = epilogue.norm.snapshot()
            epilogue = epilogue._replace(norm=norm)
            operands = [vector for vector in norm[:4] if vector is not None]
        count = self._count + sum([vector._version for vector in operands])
        deferred = DeferredConv(self.call, epilogue, self.steps + step, count)
        deferred.fallback = otherwise(alone)
        self._used, self.call.history.seen = _TAKEN, deferred.steps
        if step == STEP_ACTIVATION:
            return deferred._launched()
        return deferred

    def __reduce_ex__(self, version: Any) -> Any:
        """A copy is nothing: None."""
        return _nothing, ()


MaybeDeferred = torch.Tensor | DeferredConv


def _nothing() -> None:
    return None


_NAMES = {
    "": "layers behind it",
    STEP_NORM: "norm",
    STEP_SUM: "sum",
    STEP_ACTIVATION: "activation",
    STEP_NORM + STEP_SUM: "norm and sum",
    STEP_NORM + STEP_ACTIVATION: "norm and activation",
    STEP_SUM + STEP_ACTIVATION: "sum and activation",
    STEPS: "norm, sum and activation",
}
