"""The compiled helper's functions for calls of layers; None where Python does all.

Each repeats a Python function, which calls it first, and answers NotImplemented where that function
is to decide; see `native.c`.
"""

from __future__ import annotations

from typing import Any

from .. import settings
from . import reads

helper: Any = None
known_call: Any = None
features_of: Any = None
normalised: Any = None
activated: Any = None
plus: Any = None
run_plain: Any = None
gradients: Any = None
observer: Any = None  # the class of what hears which views of maps are wanted; set by `capture`


# Of layers in inference, and in training.
INFERENCE = "known_call", "features_of", "normalised", "activated", "plus"
TRAINING = "run_plain", "gradients"
FUNCTIONS = INFERENCE + TRAINING


def known(plan: Any, product: Any) -> Any:
    """A FusedPlan for the helper; None where it is not used.  product: the GatherProduct that
    launches it, or None."""
    if helper is None or not settings.get().native:
        return None
    described, units, how = _launches(product)
    return helper.Known(
        *described,
        plan.form,
        plan.between,
        plan.vectors,
        plan.read,
        plan.same,
        plan.n_offsets,
        plan.regular,
        plan.device,
        plan.activation,
        plan.steps,
        plan.columns,
        plan.generation,
        units,
        plan.at_the_call,
        *how,
    )


def known_product(product: Any, columns: int) -> Any:
    """The launches of a GatherProduct of `columns` without an epilogue that is its own; None where the helper is not
    used."""
    if helper is None or not settings.get().native:
        return None
    described, units, how = _launches(product)
    absent = (None,) * 6
    layer = None, absent[:5], (), absent, None, None, None, None, None, ""
    return helper.Known(*described, *layer, columns, 0, units, True, *how)


def _launches(product: Any) -> tuple[list[Any], int, tuple[int, int, int, int]]:
    """(what of a product `Known` takes first, compute units, how it goes over maps)."""
    keys, tuned, specs, units, how = (0, 0), None, {}, 1, (0, 0, 0, 0)
    if product is not None:
        keys, tuned, specs, units, how = product.for_helper()
    return [product, *keys, *[("bound", key) for key in keys], tuned, specs], units, how


def use(module: Any) -> None:
    """Hand the helper what it reads, and have Python's functions call it. Raises Refusal where a name is gone."""
    global helper
    module.configure(reads.handed())
    for name in FUNCTIONS:
        globals()[name] = getattr(module, name)
    helper = module
