"""What a run compiles for a target: everything, or a quick representative part."""

from __future__ import annotations

import torch

from ...kernels.runtime.target import Target
from .catalogue import covering, spaces
from .checks import product_of
from .forms import POINTED, Form
from .forms_gemm import products

_TURNS = 3  # architectures that share the kernels other than products among them


def selected(target: Target, index: int, full: bool) -> list[Form]:
    """Forms to compile. index: of the target among the architectures of the run."""
    return covering(target) if full else representative(target, index)


def representative(target: Target, index: int) -> list[Form]:
    """One product of every dtype and precision, with its largest default tile, forward and wgrad
    taking turns, and every third other kernel."""
    forms = {name: declared[0].covering() for name, declared in spaces(target).items()}
    multiply = sorted(name for name in forms if product_of(forms[name][0]) is not None)
    chosen = []
    for turn, (dtype, precision) in enumerate(products(target)):
        name = product_name(dtype, precision)
        kernels = [k for k in multiply if any(product_of(form) == name for form in forms[k])]
        of_kind = [form for form in forms[kernels[(turn + index) % len(kernels)]] if product_of(form) == name]
        chosen.append(max(of_kind, key=_size))
    others = sorted(set(forms) - set(multiply))
    return chosen + [forms[name][0] for name in others[index % _TURNS :: _TURNS]]


def product_name(dtype: torch.dtype, precision: str) -> str:
    """What `product_of` says of forms with this dtype and precision."""
    return POINTED[dtype] if precision in ("ieee", "half") else precision


def _size(form: Form) -> int:
    named = form.named
    return named["BLOCK_M"] * named["BLOCK_N"] * named["BLOCK_K"]
