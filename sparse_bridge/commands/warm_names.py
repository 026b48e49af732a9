"""Networks and dtypes, as the options of `warm` and `package` name them."""

from __future__ import annotations

MODELS = ("second", "unet")
DTYPES = {
    "fp16": ("float16", False),
    "bf16": ("bfloat16", False),
    "fp32": ("float32", False),
    "tf32": ("float32", True),
}  # torch's name for the dtype of the products, and whether fp32 may round to TF32
