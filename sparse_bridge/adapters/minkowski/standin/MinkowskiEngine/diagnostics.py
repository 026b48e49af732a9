"""A report about the machine."""

import sys

from sparse_bridge.adapters.minkowski.upstream.system import diagnostics, parse_nvidia_smi

__all__ = ["parse_nvidia_smi", "print_diagnostics"]


def print_diagnostics():
    """Print platform, torch, GPUs and version."""
    import MinkowskiEngine

    sys.stdout.write(diagnostics(MinkowskiEngine.__version__) + "\n")
