"""The package of MinkowskiEngine's compiled part, answered by sparse_bridge."""

__version__ = "0.5.4"
