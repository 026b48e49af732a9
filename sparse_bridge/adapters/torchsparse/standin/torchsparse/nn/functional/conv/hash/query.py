"""Finding keys."""

from torchsparse.nn.functional.query import sphashquery

__all__ = ["sphashquery"]
