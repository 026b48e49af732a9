"""mmdetection3d's MinkUNet on torchsparse 1.4: layers out of a registry, positional arguments.

Source: layer stack S10 of the usage notes. Coordinates are [x, y, z, batch].
"""

from __future__ import annotations

import torch
import torchsparse
from torch import nn
from torchsparse.nn import BatchNorm, Conv3d, GroupNorm, LeakyReLU, ReLU

MODELS: dict[str, type[nn.Module]] = {}


def register_module(module, name):
    """A registry refuses a second class under one name."""
    if name in MODELS:
        raise KeyError(f"{name} is already registered")
    if not isinstance(module, type):
        raise TypeError(f"{name} must be a class, but got {type(module)}")
    MODELS[name] = module


register_module(Conv3d, "TorchSparseConv3d")
register_module(BatchNorm, "TorchSparseBN")
register_module(GroupNorm, "TorchSparseGN")
register_module(ReLU, "TorchSparseReLU")
register_module(LeakyReLU, "TorchSparseLeakyReLU")


class TorchSparseConvModule(nn.Sequential):
    """Convolution, norm, activation; the last may be absent."""

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        dilation=1,
        bias=False,
        transposed=False,
        norm_cfg=None,
        act_cfg=None,
    ):
        norm = dict(norm_cfg or {"type": "TorchSparseBN"})
        layers = [
            MODELS["TorchSparseConv3d"](in_channels, out_channels, kernel_size, stride, dilation, bias, transposed),
            MODELS[norm.pop("type")](out_channels, **norm),
        ]
        if act_cfg is not None:
            act = dict(act_cfg)
            layers.append(MODELS[act.pop("type")](**act))
        super().__init__(*layers)


RELU = {"type": "TorchSparseReLU", "inplace": True}


class TorchSparseBasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size=3, stride=1, dilation=1):
        super().__init__()
        self.net = nn.Sequential(
            TorchSparseConvModule(in_channels, out_channels, kernel_size, stride, dilation, act_cfg=RELU),
            TorchSparseConvModule(out_channels, out_channels, kernel_size, 1, dilation),
        )
        if in_channels == out_channels and stride == 1:
            self.downsample = nn.Identity()
        else:
            self.downsample = TorchSparseConvModule(in_channels, out_channels, 1, stride, dilation)
        self.relu = ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.net(x) + self.downsample(x))


class MinkUNetBackbone(nn.Module):
    def __init__(
        self,
        in_channels=4,
        base_channels=32,
        encoder_channels=(32, 64, 128, 256),
        encoder_blocks=(2, 2, 2, 2),
        decoder_channels=(256, 128, 96, 96),
        decoder_blocks=(2, 2, 2, 2),
    ):
        super().__init__()
        self.conv_input = nn.Sequential(
            TorchSparseConvModule(in_channels, base_channels, 3, act_cfg=RELU),
            TorchSparseConvModule(base_channels, base_channels, 3, act_cfg=RELU),
        )
        widths = [base_channels, *encoder_channels]
        self.encoder = nn.ModuleList()
        for before, width, count in zip(widths, encoder_channels, encoder_blocks, strict=False):
            layers = [TorchSparseConvModule(before, before, 2, 2, act_cfg=RELU)]
            layers += [TorchSparseBasicBlock(width if i else before, width, 3) for i in range(count)]
            self.encoder.append(nn.Sequential(*layers))
        self.decoder = nn.ModuleList()
        before = widths[-1]
        laterals = widths[-2::-1]
        for lateral, width, count in zip(laterals, decoder_channels, decoder_blocks, strict=True):
            up = TorchSparseConvModule(before, width, 2, 2, transposed=True, act_cfg=RELU)
            blocks = [TorchSparseBasicBlock(width if i else width + lateral, width, 3) for i in range(count)]
            self.decoder.append(nn.ModuleList([up, nn.Sequential(*blocks)]))
            before = width

    def forward(self, voxel_features, coors):
        x = self.conv_input(torchsparse.SparseTensor(voxel_features, coors))
        laterals = [x]
        for encoder_layer in self.encoder:
            x = encoder_layer(x)
            laterals.append(x)
        laterals = laterals[:-1][::-1]
        for decoder_layer, lateral in zip(self.decoder, laterals, strict=True):
            x = decoder_layer[0](x)
            x = torchsparse.cat((x, lateral))
            x = decoder_layer[1](x)
        return x.F


class Segmentor(nn.Module):
    """A backbone and mmdetection3d's MinkUNetHead: one linear layer per voxel."""

    def __init__(self, backbone, channels, num_classes):
        super().__init__()
        self.backbone = backbone
        self.decode_head = nn.Module()
        self.decode_head.conv_seg = nn.Linear(channels, num_classes)

    def forward(self, voxel_features, coors):
        return self.decode_head.conv_seg(self.backbone(voxel_features, coors))


def build(in_channels=4, num_classes=19, **widths):
    backbone = MinkUNetBackbone(in_channels, **widths)
    return Segmentor(backbone, widths.get("decoder_channels", (96,))[-1], num_classes)


def batch(scene, device, dtype):
    """(voxel features, coordinates with the batch index last)."""
    coors = torch.cat([scene.coords[:, 1:], scene.coords[:, :1]], dim=1).contiguous()
    return scene.features.to(device, dtype), coors.to(device)
