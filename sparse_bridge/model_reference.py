"""What belongs to a model and does not keep it: a program that drops its model gets all memory back at once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModelReference:
    """A model as long as the program has it, and the forward of its class."""

    def __init__(self, model: nn.Module, gone: Callable[[], None] | None = None) -> None:
        """gone: called once the model is dropped; not kept, where it is a method."""
        end = None
        if gone is not None:
            kept = weakref.WeakMethod(gone)

            def end(_: Any) -> None:
                if (function := kept()) is not None:
                    function()

        self._model = weakref.ref(model, end)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model hold references to the copy."""
        state = {name: value for name, value in self.__dict__.items() if name != "_model"}
        return {"model": self.model, **state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModelReference.__init__(self, state["model"])
        self.__dict__.update({name: value for name, value in state.items() if name != "model"})

    @property
    def model(self) -> nn.Module:
        """The model. Raises ReferenceError where it is gone."""
        model = self._model()
        if model is None:
            raise ReferenceError("a model was called that its program has dropped")
        return model

    @property
    def forward(self) -> Callable[..., Any]:
        """What its class computes, whatever stands for that in the model itself."""
        model = self.model
        return functools.partial(type(model).forward, model)

    def run_layers(self, *args: Any, **kwargs: Any) -> Any:
        """The same, called."""
        model = self.model
        return type(model).forward(model, *args, **kwargs)
