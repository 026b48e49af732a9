"""spconv's compiled extension: importable, but its functions have no counterpart here."""

from sparse_bridge.errors import UnsupportedError


class MissingExtensionError(UnsupportedError, AttributeError):
    """A part of spconv's compiled code was asked for.

    An AttributeError too, so that `hasattr` and searches through all modules get their answer.
    """

    @classmethod
    def of(cls, module, name):
        if name.startswith("__"):  # the import system and inspection ask for many of these
            return AttributeError(f"module {module!r} has no attribute {name!r}")
        return cls(
            f"{module}.{name} is part of spconv's compiled code, which is not used here; "
            "use the Python API of spconv.pytorch instead."
        )


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
