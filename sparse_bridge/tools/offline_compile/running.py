"""Compiling many forms in parallel processes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed

from ...errors import DeviceError, UnsupportedError
from ...kernels.runtime.target import described
from ...names import meant
from ...workers import cores
from ..harness.pool import CrashedError, Pool
from .catalogue import spaces
from .checks import problems
from .compiling import Code, compile_form
from .forms import Form
from .selection import selected

_FEW = 8  # forms for which starting processes takes longer
_MOST_SECONDS = 20.0  # of processor time that a form may take: users wait for it


@dataclasses.dataclass(frozen=True)
class Result:
    """One form on one target. code: None where it did not compile; problems: () if it may ship;
    seconds: of processor time."""

    arch: str
    form: Form
    code: Code | None
    problems: tuple[str, ...]
    seconds: float


def examine(arch: str, form: Form) -> Result:
    """Compile one form in this process, afresh, and check it."""
    target, begin = described(arch), processor_seconds()
    code = None
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            code = compile_form(form, target)
            failures = tuple(problems(form, target, code))
        # Triton's compilers raise whatever they like; that is the finding.
        except Exception as error:
            last = str(error).strip().splitlines() or [""]
            failures = (f"does not compile: {type(error).__name__}: {last[-1]}",)
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
    seconds = processor_seconds() - begin
    if seconds > _MOST_SECONDS:
        failures += (f"takes {seconds:.0f} s to compile; allowed {_MOST_SECONDS:.0f}",)
    return Result(arch, form, code, failures, seconds)


def processor_seconds() -> float:
    """Of this process and of those it has started and waited for, such as an assembler."""
    return sum(os.times()[:4])


def jobs_for(archs: Sequence[str], full: bool, kernels: Sequence[str] = ()) -> list[tuple[str, Form]]:
    """(architecture, form) of a whole run. kernels: only those with these names; (): all.

    Raises: DeviceError for a name that is no architecture, UnsupportedError for one that is no
    kernel or of which a quick run has no form.
    """
    if not archs:
        raise DeviceError("no architecture was named; expected names like gfx942 or sm_90.")
    targets = [described(arch) for arch in archs]
    names = set().union(*map(spaces, targets))
    unknown = sorted(set(kernels) - names)
    if unknown:
        hint = meant(unknown[0], names)
        raise UnsupportedError(
            f"no kernel is named {', '.join(unknown)}; expected some of {', '.join(sorted(names))}.{hint}"
        )
    jobs = [
        (target.arch, form)
        for index, target in enumerate(targets)
        for form in selected(target, index, full)
        if not kernels or form.kernel in kernels
    ]
    if not jobs:
        raise UnsupportedError(
            f"{', '.join(archs)}: a quick run has no form of {', '.join(sorted(kernels))}. "
            "Ask for every form with --full, or name more targets."
        )
    return jobs


def run(
    jobs: Sequence[tuple[str, Form]],
    workers: int | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Examine all jobs; results in the order of the jobs, `on_result` as they come.

    workers: processes (default: one per CPU that this process may use).
    """
    workers = workers or cores()
    results: dict[int, Result] = {}

    def keep(index: int, result: Result) -> None:
        results[index] = result
        on_result(result)

    if workers == 1 or len(jobs) <= _FEW:
        for index, job in enumerate(jobs):
            keep(index, examine(*job))
    else:
        with Pool(min(workers, len(jobs))) as pool:
            waiting = {pool.submit(examine, *job): index for index, job in enumerate(jobs)}
            for done in as_completed(waiting):
                index = waiting[done]
                try:
                    keep(index, done.result())
                except CrashedError:
                    keep(index, Result(*jobs[index], None, ("the compiler crashed",), 0.0))
    return [results[index] for index in range(len(jobs))]


def failures(results: Sequence[Result]) -> Iterator[Result]:
    """Those that may not ship."""
    return (result for result in results if result.problems)
