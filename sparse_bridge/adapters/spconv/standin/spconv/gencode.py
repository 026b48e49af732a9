"""spconv's export of its own C++ sources: importable, nothing to export here."""

from sparse_bridge.adapters.spconv.upstream.missing import MissingExtensionError


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
