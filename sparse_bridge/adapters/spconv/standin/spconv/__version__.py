"""The version, where upstream's `__init__` has it from."""

from spconv import __version__ as __version__
