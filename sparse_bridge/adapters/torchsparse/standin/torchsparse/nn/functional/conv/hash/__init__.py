"""Keys of coordinates, and finding them."""

from torchsparse.nn.functional.hash import sphash
from torchsparse.nn.functional.query import sphashquery

__all__ = ["sphash", "sphashquery"]
