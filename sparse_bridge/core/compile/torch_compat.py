"""What releases of torch have, or have not, of the registration of operators."""

from __future__ import annotations

import torch

BATCHED = hasattr(torch.library, "register_vmap")  # torch 2.5; before, torch itself refuses vmap


class Parts:
    """What torch's own registration of gradients is made of, which a release may not have."""

    below = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
    requires_grad = getattr(torch._C, "_any_requires_grad", None)
    autograd = getattr(getattr(torch, "_library", None), "autograd", None)

    @classmethod
    def there(cls) -> bool:
        parts = ("Info", "make_autograd_impl")
        known = all(hasattr(cls.autograd, name) for name in parts)
        return known and cls.below is not None and cls.requires_grad is not None
