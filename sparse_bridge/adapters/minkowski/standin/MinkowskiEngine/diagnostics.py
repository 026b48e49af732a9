"""A report about the machine."""

import sys

from sparse_bridge.adapters.minkowski.upstream.system import diagnostics

__all__ = ["print_diagnostics"]


def print_diagnostics():
    """Print platform, torch, GPUs and version."""
    import MinkowskiEngine

    sys.stdout.write(diagnostics(MinkowskiEngine.__version__) + "\n")
