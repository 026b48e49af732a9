"""The interpreter of recorded cases: build, run, compare.

A case is a program: modules, inputs, statements and outputs. What their names mean, how a tensor is
made and what is read of a result is the dialect of a framework: a subclass of `Case`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tests.goldens.compare import Measure, Mismatch, Report
from tests.goldens.names import attribute

__all__ = ["Case", "Program"]


@dataclasses.dataclass
class Program:
    """What one case runs. A step is (target, operation, arguments, keywords)."""

    modules: dict[str, Any] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: Sequence[Sequence[Any]] = ()
    outputs: Sequence[dict[str, Any]] = ()
    train: bool = True
    grad: bool = True
    # The state of the module of this name is stored without it.
    bare: str = ""


class Case:
    """One recorded case, and the grammar that the frameworks share."""

    framework: ClassVar[str]  # what is imported
    # Arrays of this name are weights, gradients and buffers. None: the dialect has its own.
    weight: ClassVar[str | None]
    gradient: ClassVar[str]
    buffer: ClassVar[str | None] = None
    measure: ClassVar[Measure]
    mark: ClassVar[str] = ""  # in front of the key of a value that is no plain JSON
    absent_is_zero: ClassVar[bool] = False  # no gradient is right where zeros are recorded
    threads: ClassVar[int] = 0  # of torch, by default; 0 keeps torch's choice

    def __init__(
        self,
        entry: dict[str, Any],
        arrays: dict[str, np.ndarray],
        device: Any = "cpu",
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        module: str = "",
    ) -> None:
        self.entry, self.spec, self.arrays = entry, entry["spec"], arrays
        self.device, self.dtype = torch.device(device), dtype
        self.override = tolerance
        self.library = importlib.import_module(module or self.framework)
        self.report = self.new_report()
        self.variant: Any = None
        self.place = ""
        self.program = self.read()

    # ---- what a dialect says

    @classmethod
    def options(cls, parser: Any) -> None:
        """Add the framework's own options."""

    @classmethod
    def select(cls, entry: dict[str, Any], args: Any) -> dict[str, Any] | None:
        """The entry as these options ask for it, or None."""
        return entry if args.source in (None, entry.get("source")) else None

    @classmethod
    def begin(cls, args: Any) -> None:
        """Prepare the library, once."""

    def read(self) -> Program:
        """The program of this case."""
        raise NotImplementedError

    def module(self, description: Any) -> nn.Module:
        raise NotImplementedError

    def input(self, name: str, how: Any) -> Any:
        raise NotImplementedError

    def function(self, operation: str) -> Any:
        raise NotImplementedError

    def check(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Compare an output. Returns what gradients start from, its rows in the recorded order."""
        raise NotImplementedError

    def upstream(self, output: dict[str, Any]) -> str:
        """The array that holds the gradient of an output."""
        raise NotImplementedError

    def expectations(self) -> None:
        """Compare what is no output."""

    def variants(self) -> Iterable[Any]:
        """The case is run once for each."""
        return (None,)

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        """The switches of a variant."""
        return contextlib.nullcontext()

    def tolerance(self) -> float:
        return self.entry.get("tol", 1e-4)

    def gradient_of(self, name: str) -> str:
        """The array that holds the gradient of array `name`."""
        return self.gradient + name

    def finish(self) -> None:
        """Leave the library as it was."""

    # ---- build, run, compare

    def new_report(self) -> Report:
        return Report(self.measure, self.tolerance() if self.override is None else self.override)

    def judge(self) -> Report:
        """Raises `Mismatch` where an answer differs, and what the candidate raises."""
        try:
            for variant in self.variants():
                self.variant = variant
                torch.manual_seed(self.spec.get("init_seed") or 0)
                with self.settings():
                    self.judge_variant()
        except Exception as error:
            error.golden_at = self.place  # type: ignore[attr-defined]
            raise
        finally:
            self.finish()
        if not self.report.comparisons:
            raise Mismatch("nothing was compared")
        return self.report

    def judge_variant(self) -> None:
        if "raises" in self.spec:
            self.judge_error(self.spec["raises"], self.spec.get("raises_at"))
            return
        self.run()
        self.place = "comparison"
        self.compare()

    def judge_error(self, names: list[str], at: str | None) -> None:
        try:
            self.run()
        except Mismatch:
            raise
        except Exception as error:
            if self.place.startswith("arguments"):
                raise
            kinds = {kind.__name__ for kind in type(error).__mro__}
            said = f"{type(error).__name__} at {self.place}: {error}"
            self.report.require(bool(kinds & set(names)), f"{said}; expected {'/'.join(names)}")
            self.report.require(at in (None, self.place), f"{said}; expected at {at}")
            return
        raise Mismatch(f"no exception; expected {'/'.join(names)}")

    def run(self) -> None:
        self.values: dict[str, Any] = {}
        self.leaves: dict[str, torch.Tensor] = {}  # by the array that a leaf was made of
        self.modules = nn.ModuleDict()
        for name, description in self.program.modules.items():
            self.place = f"{name}:init"
            self.modules[name] = self.module(description)
        self.place = "weights"
        if self.weight is not None:
            self.load_weights(self.weight)
        self.place = "input"
        for name, how in self.program.inputs.items():
            self.values[name] = self.input(name, how)
        with torch.set_grad_enabled(self.program.grad):
            for step in self.program.steps:
                self.step(*step)

    def key(self, name: str) -> str:
        """The stored name of a parameter or buffer."""
        return name.removeprefix(self.program.bare)

    def load_weights(self, prefix: str) -> None:
        state = self.modules.state_dict()
        have = {prefix + self.key(name): value.shape for name, value in state.items()}
        want = {name: a.shape for name, a in self.arrays.items() if name.startswith(prefix)}
        odd = sorted(k for k in have.keys() | want.keys() if have.get(k) != want.get(k))
        self.report.require(not odd, f"state_dict: {len(odd)} keys or shapes differ, {odd[:3]}")
        stored = {name: self.arrays[prefix + self.key(name)] for name in state}
        if self.spec.get("init_seed") is not None:
            for name, value in state.items():
                if value.is_floating_point():
                    self.report.close(f"initial {name}", value, stored[name])
        self.modules.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in stored.items()})
        self.modules.to(self.device, None if self.dtype == torch.float32 else self.dtype)
        self.modules.train(self.program.train)
        for name, parameter in self.modules.named_parameters():
            self.leaves[prefix + self.key(name)] = parameter

    def step(
        self, target: Any, operation: str, args: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> None:
        """One statement. Several targets take one item of the result each."""
        name = target if isinstance(target, str) else target[0]
        self.place = f"arguments of {name}"
        function = self.function(operation)
        positional = [self.value(a) for a in args]
        named = {k: self.value(v) for k, v in (keywords or {}).items()}
        self.place = name
        result = function(*positional, **named)
        if isinstance(target, str):
            self.values[target] = result
        else:
            self.values.update(zip(target, result, strict=True))

    def compare(self) -> None:
        loss: Any = 0
        for output in self.program.outputs:
            answer = self.check(output)
            gradient = self.arrays.get(self.upstream(output)) if self.program.grad else None
            if gradient is not None:
                assert answer is not None, output
                loss = loss + (answer * torch.from_numpy(gradient).to(answer)).sum()
        self.expectations()
        if self.buffer is not None:
            self.compare_buffers(self.buffer)
        if torch.is_tensor(loss):
            loss.backward()
        if self.program.grad:
            self.compare_gradients()

    def compare_buffers(self, prefix: str) -> None:
        state = {prefix + self.key(k): v for k, v in self.modules.state_dict().items()}
        for name in self.arrays:
            if name.startswith(prefix):
                self.report.array(name, state[name], self.arrays[name])

    def compare_gradients(self) -> None:
        leaves = {self.gradient_of(name): leaf for name, leaf in self.leaves.items()}
        for name, leaf in leaves.items():
            if not leaf.requires_grad:
                self.report.require(leaf.grad is None, f"{name}: nobody asked for this gradient")
        for name in self.arrays:
            if name.startswith(self.gradient):
                leaf = leaves.get(name)
                got = None if leaf is None else leaf.grad
                self.compare_gradient(name, got, self.arrays[name])

    def compare_gradient(self, name: str, got: torch.Tensor | None, want: np.ndarray) -> None:
        if got is None and self.absent_is_zero and not want.any():
            got = torch.zeros(want.shape)
        if got is None:
            raise Mismatch(f"{name}: no gradient reached it")
        limit = None if self.override is not None else self.entry.get("grad_tol")
        self.report.close(name, got, want, limit, self.entry.get("grad_metric") == "rms")

    def compare_sparse(
        self,
        label: str,
        rows: Any,
        features: Any,
        want_rows: np.ndarray,
        want_features: np.ndarray,
        ordered: bool = False,
        tolerance: float | None = None,
    ) -> torch.Tensor:
        """Coordinates, then features by coordinate. Returns the features in the recorded order."""
        places = self.report.rows(f"{label} rows", rows, want_rows, ordered)
        features = torch.as_tensor(features)
        self.report.same(f"{label}: rows of features", len(features), len(places))
        aligned = features[torch.from_numpy(places).to(features.device)]
        self.report.close(f"{label} features", aligned, want_features, tolerance)
        return aligned

    # ---- values

    def tensor(self, name: str, grad: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An array on the device, float32 in the case's dtype. With `grad`, a leaf."""
        tensor = torch.from_numpy(np.array(self.arrays[name]))
        if tensor.dtype == torch.float32:
            tensor = tensor.to(dtype or self.dtype)
        tensor = tensor.to(self.device)
        if grad and tensor.is_floating_point():
            self.leaves[name] = tensor.requires_grad_()
        return tensor

    def value(self, v: Any) -> Any:
        """The meaning of an argument."""
        if isinstance(v, str):
            return self.word(v)
        if isinstance(v, list):
            return [self.value(i) for i in v]
        if isinstance(v, dict):
            for key in v:
                name = key.removeprefix(self.mark)
                if key.startswith(self.mark) and hasattr(self, f"mark_{name}"):
                    return getattr(self, f"mark_{name}")(v[key], v)
            return {k: self.value(i) for k, i in v.items()}
        return v

    def word(self, v: str) -> Any:
        """`$name.attribute.0` is a value of the program; other words are themselves."""
        if not v.startswith("$"):
            return v
        name, *path = v[1:].split(".")
        return attribute(self.values[name], path)

    def mark_tuple(self, v: list[Any], whole: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.value(i) for i in v)

    def mark_slice(self, v: list[Any], whole: dict[str, Any]) -> slice:
        return slice(*v)

    def mark_size(self, v: list[int], whole: dict[str, Any]) -> torch.Size:
        return torch.Size(v)

    def mark_dtype(self, v: str, whole: dict[str, Any]) -> torch.dtype:
        return getattr(torch, v)

    def mark_device(self, v: Any, whole: dict[str, Any]) -> torch.device:
        return self.device
