"""Switches of the convolutions.

allow_tf32: None follows torch's own switch (FlexGEMM starts with True); True or False is obeyed at
every call. The others have no meaning: they are of FlexGEMM's own kernels.
"""

allow_tf32 = None
USE_ON_THE_FLY_WEIGHT_TRANSPOSE = False
autotune_config = []
