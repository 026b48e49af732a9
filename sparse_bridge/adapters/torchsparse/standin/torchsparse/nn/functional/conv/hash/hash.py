"""Keys of coordinates."""

from torchsparse.nn.functional.hash import sphash

__all__ = ["sphash"]
