"""Errors of this adapter that also are what torchsparse raises in the same situation."""

from __future__ import annotations

from ...errors import SparseBridgeError


class SignatureError(SparseBridgeError, TypeError):
    """A call does not fit the signature of the torchsparse release in force."""


class SampleKeyError(SparseBridgeError, KeyError):
    """A sample of a batch lacks a key that the first one has."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class MissingMapError(SparseBridgeError, KeyError, TypeError):
    """A transposed layer has no earlier layer whose map it could reverse (KeyError up to 2.0,
    TypeError in 2.1)."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])
