"""Modules that were tried and are not replayed, and where nothing is left to try."""

from __future__ import annotations

from collections.abc import Container, MutableMapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import policy


class RefusedModules:
    """The reason of each, while the program has it. A module whose calls something stood against, such as hooks, is
    tried again now and then: that may be over."""

    def __init__(self) -> None:
        # Modules may be equal to others.
        self._reasons: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
        self._hindered: MutableMapping[nn.Module, policy.Attempts] = WeakIdKeyDictionary()
        self._exhausted: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()

    def refuse(self, module: nn.Module, reason: str, hindered: bool) -> None:
        """Try modules inside of it. hindered: what stood against its calls may be over one day."""
        self._reasons[module] = reason
        if hindered:
            self._hindered.setdefault(module, policy.Attempts(policy.HINDERED_AGAIN)).failed()
        self._exhausted.clear()

    def may_be_tried(self, module: nn.Module, served: Container[nn.Module]) -> bool:
        """Whether a module was not refused, or it is time to try it again, as none inside of it is among those
        that are `served`."""
        if module not in self._reasons:
            return True
        attempts = self._hindered.get(module)
        if attempts is None or not attempts.due() or any(inner in served for inner in module.modules()):
            return False
        del self._reasons[module]
        return True

    def exhausted(self, innermost: nn.Module) -> bool:
        """Whether no module around this one is left to try."""
        return innermost in self._exhausted

    def exhaust(self, modules: list[nn.Module]) -> None:
        """There is none around the last of these, which are inside of each other, unless one is to be tried again."""
        if not any(module in self._hindered for module in modules):
            self._exhausted[modules[-1]] = True

    def reasons(self) -> list[tuple[nn.Module, str]]:
        """Why modules are not replayed."""
        return list(self._reasons.items())

    def forget(self, module: nn.Module) -> None:
        """Have a module tried again as if it had not been."""
        self._reasons.pop(module, None)
        self._hindered.pop(module, None)

    def clear(self) -> None:
        """Forget all of them."""
        for known in (self._reasons, self._hindered, self._exhausted):
            known.clear()
