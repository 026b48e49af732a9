"""Cases of the emulator's own test: kernels that run on every architecture, and what they are
compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
QUICK = ("gfx942", "gfx1100")  # run by every test run, with the cases named `quick`
Run = Callable[[str], object]


class Cases:
    """(name, run, architectures) of one file: `@case("name")` adds one, `everywhere` runs them."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Run, Sequence[str]]] = []

    def __call__(self, name: str, archs: Sequence[str] | None = None) -> Callable[[Run], None]:
        def add(run: Run) -> None:
            self.found.append((name, run, ARCHS if archs is None else archs))

        return add

    def everywhere(self, test: Callable[..., None]) -> Callable[..., None]:
        """Parametrize a test by (arch, run); most of them are slow."""
        chosen = [
            pytest.param(arch, run, id=f"{arch}-{name}", marks=_marks(arch, index))
            for index, (name, run, archs) in enumerate(self.found)
            for arch in ARCHS
            if arch in archs
        ]
        return pytest.mark.parametrize("arch, run", chosen)(test)


def _marks(arch: str, index: int) -> list[pytest.MarkDecorator]:
    """Every sixth case stays in the quick lane."""
    return [] if arch in QUICK and index % 6 == 0 else [pytest.mark.slow]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _complain(wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} are wrong, first at {at}: "
            f"{got.flatten()[at].item()}, expected {want.flatten()[at].item()}"
        )


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    """Within `tolerance` of 1 + |want|; infinities and NaN where they belong."""
    got, want = got.double(), want.double()
    near = (got - want).abs() <= tolerance * (1 + want.abs())
    _complain(~(near | (got == want) | (got.isnan() & want.isnan())), got, want, what)


def same(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Bit for bit, but for the sign of zero."""
    _complain(got != want.to(got.dtype), got, want, what)
