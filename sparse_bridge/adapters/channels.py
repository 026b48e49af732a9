"""Numbers of channels that a layer is made with; every framework's stand-in checks them alike."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import ContractError, DataTypeError


def check_channels(channels: dict[str, Any], error: type[Exception] = ContractError) -> None:
    """Raises DataTypeError unless every number, by its argument, is a whole one, and `error` below 1."""
    for argument, number in channels.items():
        try:
            whole = operator.index(number)
        except TypeError:
            kind = type(number).__name__
            raise DataTypeError(f"{argument} is {number!r} ({kind}); expected a whole number of channels.") from None
        if whole < 1:
            raise error(f"{argument}={number}; expected 1 or more channels.")
