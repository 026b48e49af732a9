"""What an epilogue has, in bits. Needs no Triton."""

# AFFINE: the norm has a gain and a beta beside its mean and variance.
# (One a line: the hash of the tuned kernels reads them.)
BIAS = 1
NORM = 2
AFFINE = 4
RESIDUAL = 8
