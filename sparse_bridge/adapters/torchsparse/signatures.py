"""The positional arguments of `Conv3d` and `conv3d`, which mean different things in each
release."""

from __future__ import annotations

from typing import Any

from . import profile as profiles
from .errors import SignatureError
from .profile import Profile, bind

_LAYER = {
    "1.4": ("dilation", "bias", "transposed"),
    "2.0": ("dilation", "bias", "transposed", "config"),
    "2.1": ("padding", "dilation", "bias", "transposed", "generative", "config"),
}
_FUNCTION = {
    "1.4": ("dilation", "transposed"),
    "2.0": ("dilation", "transposed", "epsilon", "mm_thresh", "kmap_mode"),
    "2.1": ("padding", "dilation", "config", "transposed", "generative", "training"),
}


def _decide(caller: str, arguments: tuple[Any, ...], old_flag: int) -> Profile:
    """The profile, corrected by a bool where 2.1 has a number, or the other way round.

    old_flag: index among `arguments` of the first bool in the old signature.
    """
    release = profiles.peek()
    if len(arguments) <= old_flag:
        return release
    is_old = isinstance(arguments[old_flag], bool)
    if release.batch_first and is_old:
        return profiles.saw_old_signature(f"{caller} got a bool at argument {old_flag + 5}")
    if not release.batch_first and not is_old:
        raise SignatureError(
            f"{caller} got {arguments[old_flag]!r} at argument {old_flag + 5}, where torchsparse "
            f"{release.name} takes a bool; in 2.1 a number stands there. If the project is written "
            "for 2.1, say enable('torchsparse', profile='2.1')."
        )
    return release


def layer_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Conv3d` behind (in_channels, out_channels, kernel_size, stride), by name.

    Raises SignatureError.
    """
    release = _decide("Conv3d", arguments, old_flag=1)
    return bind("Conv3d", _LAYER[release.name], arguments, keywords)


def conv3d_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `conv3d` behind (input, weight, kernel_size, bias, stride), by name.

    Raises SignatureError.
    """
    release = _decide("conv3d", arguments, old_flag=1)
    bound = bind("conv3d", _FUNCTION[release.name], arguments, keywords)
    if release.name == "2.0":
        bound.pop("epsilon", None)
        bound.pop("mm_thresh", None)
        bound["config"] = {"kmap_mode": bound.pop("kmap_mode", "hashmap")}
    bound.pop("training", None)
    return bound


def coords_arguments(
    caller: str, names: tuple[str, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name of a function whose first one is coordinates: `_coords` in 2.1, `coords`
    before; either is taken.

    Raises SignatureError.
    """
    if "coords" in keywords:
        if "_coords" in keywords or arguments:
            raise SignatureError(f"{caller} got its coordinates twice.")
        keywords = {"_coords": keywords["coords"], **keywords}
        del keywords["coords"]
    bound = bind(caller, ("_coords", *names), arguments, keywords)
    if "_coords" not in bound:
        raise SignatureError(f"{caller} needs coordinates, int32 [N, 4], as its first argument.")
    return {"coords": bound.pop("_coords"), **bound}
