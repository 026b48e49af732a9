"""ACT of the kernels, by names of activations. Compile servers read it, whose torch has no modules."""

from __future__ import annotations

# 0 is none. (One a line: the hash of the tuned kernels reads them.)
RELU = 1
LEAKY_RELU = 2

# Of those that kernels compute.
NUMBERS: dict[str | None, int] = {None: 0, "relu": RELU, "leaky_relu": LEAKY_RELU}
