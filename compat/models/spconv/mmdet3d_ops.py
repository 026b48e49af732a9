"""mmdetection3d's way to spconv: a registry of layers, version 2 of the modules, block makers."""

from __future__ import annotations

from typing import Any

import spconv
import torch
from torch import nn

IS_SPCONV2_AVAILABLE = hasattr(spconv, "__version__") and spconv.__version__ >= "2.0.0"

if IS_SPCONV2_AVAILABLE:
    from spconv.pytorch import (
        SparseConv2d,
        SparseConv3d,
        SparseConv4d,
        SparseConvTensor,
        SparseConvTranspose2d,
        SparseConvTranspose3d,
        SparseConvTranspose4d,
        SparseInverseConv2d,
        SparseInverseConv3d,
        SparseInverseConv4d,
        SparseModule,
        SparseSequential,
        SubMConv2d,
        SubMConv3d,
        SubMConv4d,
    )
else:
    raise ImportError("spconv 2.x is needed")


class Registry:
    """Classes by name; a name is taken once unless forced."""

    def __init__(self) -> None:
        self.module_dict: dict[str, type] = {}

    def _register_module(self, module: type, module_name: str | None = None, force: bool = False) -> None:
        if not isinstance(module, type):
            raise TypeError(f"module must be a class, but got {type(module)}")
        name = module_name or module.__name__
        if not force and name in self.module_dict:
            raise KeyError(f"{name} is already registered")
        self.module_dict[name] = module

    def build(self, cfg: dict[str, Any], *args: Any, **kwargs: Any) -> nn.Module:
        options = dict(cfg)
        return self.module_dict[options.pop("type")](*args, **kwargs, **options)


MODELS = Registry()
MODELS._register_module(nn.BatchNorm1d, "BN1d")


def register_spconv2() -> None:
    """Put spconv's layers in place of the vendored ones, and take over their loading."""
    for layer in (
        SparseConv2d,
        SparseConv3d,
        SparseConv4d,
        SparseConvTranspose2d,
        SparseConvTranspose3d,
        SparseConvTranspose4d,
        SparseInverseConv2d,
        SparseInverseConv3d,
        SparseInverseConv4d,
        SubMConv2d,
        SubMConv3d,
        SubMConv4d,
    ):
        MODELS._register_module(layer, layer.__name__, force=True)
    SparseModule._version = 2
    SparseModule._load_from_state_dict = _load_from_state_dict


def _load_from_state_dict(
    self: Any,
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Weights of modules saved before version 2 have their output channels last: move them."""
    version = local_metadata.get("version")
    for hook in self._load_state_dict_pre_hooks.values():
        hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    state = {**self._parameters, **self._buffers}
    for name, own in state.items():
        if own is None:
            continue
        key = prefix + name
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            continue
        stored = state_dict[key]
        if version != 2:
            stored = stored.permute([-1, *range(stored.ndim - 1)])
        if stored.shape != own.shape:
            error_msgs.append(f"size mismatch for {key}: {stored.shape} against {own.shape}")
            continue
        try:
            with torch.no_grad():
                own.copy_(stored)
        except Exception as error:
            error_msgs.append(f"{key}: {error}")
    if strict:
        known = {*self._modules, *state}
        inside = (key for key in state_dict if key.startswith(prefix))
        unexpected_keys += [k for k in inside if k[len(prefix) :].split(".", 1)[0] not in known]


register_spconv2()

NORM = {"type": "BN1d", "eps": 1e-3, "momentum": 0.01}


def build_norm_layer(cfg: dict[str, Any], width: int, postfix: int | str = "") -> tuple:
    """(name, layer) of a norm."""
    options = dict(cfg)
    layer = MODELS.module_dict[options.pop("type")](width, **options)
    return f"bn{postfix}", layer


class BasicBlock(nn.Module):
    """The image-style residual block that the sparse one inherits from."""

    def __init__(self, inplanes: int, planes: int, downsample: Any, conv_cfg: Any, norm_cfg: Any):
        super().__init__()
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, planes, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        options = {"stride": 1, "padding": 1, "bias": False}
        self.conv1 = MODELS.build(conv_cfg, inplanes, planes, 3, **options)
        self.add_module(self.norm1_name, norm1)
        self.conv2 = MODELS.build(conv_cfg, planes, planes, 3, **options)
        self.add_module(self.norm2_name, norm2)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    @property
    def norm1(self) -> nn.Module:
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        return getattr(self, self.norm2_name)


class SparseBasicBlock(BasicBlock, SparseModule):
    """Residual block of submanifold layers; both bases are initialised, the sparse one first."""

    def __init__(self, inplanes: int, planes: int, downsample: Any = None, conv_cfg: Any = None, norm_cfg: Any = NORM):
        SparseModule.__init__(self)
        BasicBlock.__init__(self, inplanes, planes, downsample, conv_cfg or {"type": "SubMConv3d"}, norm_cfg)

    def forward(self, x: Any) -> Any:
        identity = x.features
        assert identity.dim() == 2, f"features are {identity.dim()}-d"
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.norm1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.norm2(out.features))
        if self.downsample is not None:
            identity = self.downsample(x).features
        return out.replace_feature(self.relu(out.features + identity))


def make_sparse_convmodule(
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    indice_key: str | None = None,
    stride: Any = 1,
    padding: Any = 0,
    conv_type: str = "SubMConv3d",
    norm_cfg: Any = NORM,
    order: tuple[str, ...] = ("conv", "norm", "act"),
) -> Any:
    """A sequence of convolution, norm and activation in the given order."""
    layers = []
    for what in order:
        if what == "conv":
            cfg = {"type": conv_type, "indice_key": indice_key}
            options = {} if "Inverse" in conv_type else {"stride": stride, "padding": padding}
            layers.append(MODELS.build(cfg, in_channels, out_channels, kernel_size, bias=False, **options))
        elif what == "norm":
            layers.append(build_norm_layer(norm_cfg, out_channels)[1])
        elif what == "act":
            layers.append(nn.ReLU(inplace=True))
    return SparseSequential(*layers)


__all__ = [
    "MODELS",
    "NORM",
    "Registry",
    "SparseBasicBlock",
    "SparseConvTensor",
    "SparseModule",
    "SparseSequential",
    "make_sparse_convmodule",
    "register_spconv2",
]
