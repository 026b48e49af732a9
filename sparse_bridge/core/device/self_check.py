"""At the first use of a GPU: do its kernels compute what a CPU computes?

Compilers and drivers have shipped that multiply wrongly on one GPU or in one dtype, without an
error. So before the first look-up with a width of keys, and before the first product in a dtype, a
tiny problem goes through the kernels that every layer uses, in variants that common layers use
too, and its result is compared with plain torch on the CPU. A verdict holds for the process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import torch

from ... import log, settings, state
from ...kernels.runtime.target import Target
from . import precision
from .self_check_problems import (
    KEYS,
    NORMS,
    POOLS,
    PRODUCTS,
    check_far,
    check_keys,
    check_new_coordinates,
    check_norms,
    check_pools,
    check_products,
    check_wgrad,
    precision_of,
)
from .torch_compat import without_modes

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SPLIT = "tf32x3"
NEW_COORDINATES, FAR = "new coordinates", "features beyond 2 GiB"
_FREE_BYTES = 5 << 30  # that FAR wants


@dataclasses.dataclass(frozen=True)
class Verdict:
    """device: as torch names it.  part: see `parts_of`.  problem: None when it passed.
    milliseconds: what the check took, compiling included.  instead: what takes over if it did
    not."""

    device: str
    part: str
    problem: str | None
    milliseconds: float
    instead: str = "the per-offset dataflow in torch"


_verdicts: dict[tuple[torch.device, str, str], Verdict] = {}
generation = 0  # counts how often verdicts were dropped
_lock = threading.RLock()


def applies(device: torch.device) -> bool:
    """GPUs are checked; on CPU tensors kernels run for tests only, and slowly."""
    return device.type in ("cuda", "xpu") and settings.get().self_check


def problem(device: torch.device, target: Target, part: str) -> str | None:
    """Why `part` cannot be trusted on `device`, or None; checked when it is first asked for. fp32
    as three TF32 products that fails is not used from then on, and IEEE multiply-adds are checked.

    device: with an index.  part: see `parts_of`.
    """
    if not applies(device):
        return None
    verdict = _verdicts.get((device, target.arch, _form(target, part)))
    verdict = verdict or run(device, target, part)
    if verdict.problem is None or _form(target, part) != SPLIT:
        return verdict.problem
    precision.forbid_split(target)
    log.once(("split", str(device)), f"{device}: {verdict.problem}; {verdict.instead} take over.", 30)
    settings.changed()  # layers that were resolved before are resolved again
    return problem(device, target, part)


def run(device: torch.device, target: Target, part: str) -> Verdict:
    """The verdict on `part`, reached now unless the process has one."""
    key = (device, target.arch, _form(target, part))
    with _lock:
        if key not in _verdicts:
            start = time.perf_counter()
            reason = find_problem(device, target, part)
            milliseconds = 1e3 * (time.perf_counter() - start)
            verdict = Verdict(str(device), part, reason, milliseconds)
            instead = "IEEE multiply-adds" if key[2] == SPLIT else None
            if part in NORMS:
                instead = "norms apart from their convolutions"
            if instead is not None:
                verdict = dataclasses.replace(verdict, instead=instead)
            _verdicts[key] = verdict
        return _verdicts[key]


def _form(target: Target, part: str) -> str:
    """What a verdict is about: fp32 may be computed in two ways, see `product_precision`."""
    return SPLIT if part in PRODUCTS and precision_of(target, part) == SPLIT else part


def products_of(target: Target) -> list[str]:
    """The parts of PRODUCTS that kernels compute on a target."""
    missing = {"bf16": not target.has_bf16, "tf32": not target.has_tf32}
    return [part for part in PRODUCTS if not missing.get(part)]


def parts_of(target: Target) -> list[str]:
    """Everything that is checked on a target."""
    products = products_of(target)
    norms = [part for part, name in NORMS.items() if name in products]
    wgrads = [f"wgrad {part}" for part in products]
    return [*KEYS, NEW_COORDINATES, *products, *wgrads, *norms, *POOLS, FAR]


def failures() -> tuple[Verdict, ...]:
    """What failed in this process so far."""
    return tuple(verdict for verdict in _verdicts.values() if verdict.problem is not None)


@state.owns
def reset() -> None:
    """Drop all verdicts: everything is checked again when it is next used."""
    global generation
    with _lock:
        _verdicts.clear()
        precision.reset()
        generation += 1
        settings.changed()


def find_problem(device: torch.device, target: Target, part: str) -> str | None:
    """Run the check of a part, a name such as "fp16" or `FAR`, without looking at earlier verdicts.

    Returns: what is wrong, in a sentence; None where nothing is, or where too little memory is free
    for the check of far addresses.
    Raises: torch.cuda.OutOfMemoryError.
    """
    words, check = _CHECKS[_group_of(part)]
    if part == FAR and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _FREE_BYTES:
        return None  # the product that asks will say that memory is short
    with torch.no_grad(), without_modes():  # the first call of a GPU may come inside of `torch.export`
        try:
            wrong = check(device, target, part)
        except torch.cuda.OutOfMemoryError:
            raise  # says nothing about the kernels
        # The point of the check: a compiler or driver may fail in any way at all.
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            wrong = f"{type(error).__name__}: {first}"
    return None if wrong is None else f"{words.format(part)} failed the self-check ({wrong})"


def _group_of(part: str) -> str:
    if part in KEYS:
        return "keys"
    if part in POOLS:
        return "pools"
    if part in NORMS:
        return "norms"
    return {NEW_COORDINATES: "maps", FAR: "far"}.get(part, "wgrad" if " " in part else "products")


_CHECKS: dict[str, tuple[str, Callable[[torch.device, Target, str], str | None]]] = {
    "keys": ("looking up coordinates by {}", check_keys),
    "maps": ("kernel maps with {}", check_new_coordinates),
    "products": ("{} products", check_products),
    "wgrad": ("{} products", check_wgrad),
    "norms": ("{} in the launch of a product", check_norms),
    "pools": ("{}", check_pools),
    "far": ("{}", check_far),
}
