"""The architectures that kernels are compiled for, and GPUs that have them."""

from __future__ import annotations

__all__ = ["ARCHITECTURES", "GPUS"]

GPUS = {
    "gfx90a": "MI210, MI250", "gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X",
    "gfx1100": "RX 7900", "gfx1151": "Ryzen AI Max (Strix Halo)", "gfx1201": "RX 9070",
    "sm_75": "T4, RTX 20", "sm_80": "A100", "sm_86": "A10, RTX 30", "sm_89": "L4, RTX 40",
    "sm_90": "H100, H200", "sm_100": "B200", "sm_120": "RTX 50",
}  # fmt: skip
ARCHITECTURES = tuple(GPUS)
