"""What releases of torch have, or have not, of the registration of operators."""

from __future__ import annotations

import torch

BATCHED = hasattr(torch.library, "register_vmap")  # torch 2.5; before, torch itself refuses vmap
