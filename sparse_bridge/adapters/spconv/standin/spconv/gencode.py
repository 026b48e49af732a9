"""spconv's export of its own C++ sources: importable, nothing to export here."""

from spconv.core_cc import MissingExtensionError


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
