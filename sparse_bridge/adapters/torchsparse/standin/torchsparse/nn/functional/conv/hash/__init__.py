"""Keys of coordinates, and finding them."""

from . import hash, query
from .hash import sphash
from .query import sphashquery

__all__ = ["hash", "query", "sphash", "sphashquery"]
