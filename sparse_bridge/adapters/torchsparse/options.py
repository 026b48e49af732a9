"""What torchsparse lets its users choose for a convolution: config objects and module switches."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ... import settings
from ...errors import ContractError, SettingError, UnsupportedError
from .profile import Profile

__all__ = ["Options", "resolve"]

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
        return Options(keep_tail=keep)
    _check_dataflow(_get(config, "dataflow", None))
    mode = _get(config, "kmap_mode", _MODES[0])
    rule = _get(config, "downsample_mode", _DOWNSAMPLING[0])
    if mode not in _MODES:
        raise ContractError(f"kmap_mode is {mode!r}; expected one of {', '.join(_MODES)}.")
    if rule not in _DOWNSAMPLING:
        raise ContractError(
            f"downsample_mode is {rule!r}; expected one of {', '.join(_DOWNSAMPLING)}."
        )
    return Options(mode, rule, keep)


def _get(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, dict):
        return config.get(name, default)
    return default if config is None else getattr(config, name, default)


def _check_dataflow(dataflow: Any) -> None:
    name = getattr(dataflow, "name", dataflow)
    if name == "CodedCSR":
        raise ContractError("the CodedCSR dataflow does not exist yet; use Dataflow.ImplicitGEMM.")
    if name is not None and name not in _DATAFLOWS:
        raise SettingError(f"dataflow is {dataflow!r}; expected a Dataflow other than CodedCSR.")
