"""What torchsparse lets its users choose for a convolution: config objects and module switches."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ... import settings
from ...errors import ContractError, SettingError, UnsupportedError
from .profile import Profile

__all__ = ["Options", "check_dataflow", "check_modes", "resolve"]

_CONFIG = "torchsparse.nn.functional.conv.conv_config"
_MODES = ("hashmap_on_the_fly", "hashmap")
_DOWNSAMPLING = ("spconv", "minkowski")
_DATAFLOWS = ("ImplicitGEMM", "GatherScatter", "FetchOnDemand")


@dataclasses.dataclass(frozen=True)
class Options:
    """kmap_mode, downsample_mode: as in the config.  keep_tail: the setting (2.1)."""

    kmap_mode: str = "hashmap_on_the_fly"
    downsample_mode: str = "spconv"
    keep_tail: bool = False


def resolve(profile: Profile, config: Any) -> Options:
    """The layer's config, else the global one, else the defaults; only what changes results counts.

    Raises ContractError, SettingError or UnsupportedError for values without a meaning.
    """
    if not profile.divides:
        if _get(config, "kmap_mode", "hashmap") not in ("hashmap", None):
            raise UnsupportedError(
                "kmap_mode='grid' orders kernel offsets differently from every other torchsparse "
                "and is not bridged; use kmap_mode='hashmap'."
            )
        return Options()
    if config is None:
        module = sys.modules.get(_CONFIG)
        if module is not None:
            config = module.get_global_conv_config() or module.get_default_conv_config()
    keep = settings.get().torchsparse_keep_tail
    if config is None:
        _check_capacity()
        return Options(keep_tail=keep)
    mode = _get(config, "kmap_mode", _MODES[0])
    rule = _get(config, "downsample_mode", _DOWNSAMPLING[0])
    check_dataflow(_get(config, "dataflow", None))
    check_modes(mode, rule)
    if mode == _MODES[0]:
        _check_capacity()
    return Options(mode, rule, keep)


def check_modes(kmap_mode: Any, downsample_mode: Any) -> None:
    """Raises ContractError for values that 2.1 does not know."""
    if kmap_mode not in _MODES:
        raise ContractError(f"kmap_mode is {kmap_mode!r}; expected one of {', '.join(_MODES)}.")
    if downsample_mode not in _DOWNSAMPLING:
        raise ContractError(f"downsample_mode is {downsample_mode!r}; expected one of {', '.join(_DOWNSAMPLING)}.")


def _check_capacity() -> None:
    """Tables grow as they must, but a ratio that torchsparse refuses is refused."""
    backends = sys.modules.get("torchsparse.backends")
    ratio = 2 if backends is None else vars(backends).get("hash_rsv_ratio", 2)
    if ratio < 2:
        raise ContractError(f"torchsparse.backends.hash_rsv_ratio is {ratio}; expected 2 or more.")


def _get(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, dict):
        return config.get(name, default)
    return default if config is None else getattr(config, name, default)


def check_dataflow(dataflow: Any) -> None:
    """Raises ContractError, SettingError for what is no dataflow; the others are one here."""
    name = getattr(dataflow, "name", dataflow)
    if name == "CodedCSR":
        raise ContractError("the CodedCSR dataflow does not exist yet; use Dataflow.ImplicitGEMM.")
    if name is not None and name not in _DATAFLOWS:
        raise SettingError(f"dataflow is {dataflow!r}; expected a Dataflow other than CodedCSR.")
