"""Pointcept's SpUNet-v1m1: residual U-Net with a stem of kernel 5."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import spconv.pytorch as spconv
import torch
from torch import nn

from .blocks import offsets


def offset2batch(offset: torch.Tensor) -> torch.Tensor:
    """Batch index of each row from the running counts."""
    counts = torch.diff(offset, prepend=offset.new_zeros(1))
    return torch.arange(len(offset), device=offset.device).repeat_interleave(counts)


class BasicBlock(spconv.SparseModule):
    """Two submanifold layers around a skip, projected by a kernel of volume 1 if widths differ."""

    def __init__(self, in_channels: int, embed_channels: int, norm_fn: Any, indice_key: str):
        super().__init__()
        if in_channels == embed_channels:
            self.proj = spconv.SparseSequential(nn.Identity())
        else:
            self.proj = spconv.SparseSequential(
                spconv.SubMConv3d(in_channels, embed_channels, kernel_size=1, bias=False), norm_fn(embed_channels)
            )
        options = {"kernel_size": 3, "stride": 1, "padding": 1, "bias": False}
        self.conv1 = spconv.SubMConv3d(in_channels, embed_channels, indice_key=indice_key, **options)
        self.bn1 = norm_fn(embed_channels)
        self.relu = nn.ReLU()
        self.conv2 = spconv.SubMConv3d(embed_channels, embed_channels, indice_key=indice_key, **options)
        self.bn2 = norm_fn(embed_channels)

    def forward(self, x: Any) -> Any:
        residual = x
        out = self.conv1(x)
        out = out.replace_feature(self.bn1(out.features))
        out = out.replace_feature(self.relu(out.features))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        out = out.replace_feature(out.features + self.proj(residual).features)
        return out.replace_feature(self.relu(out.features))


class SpUNetBase(nn.Module):
    """channels: four encoder widths, then four of the decoder; layers: blocks of each."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        base_channels: int = 32,
        channels: Any = (32, 64, 128, 256, 256, 128, 96, 96),
        layers: Any = (2, 3, 4, 6, 2, 2, 2, 2),
        cls_mode: bool = False,
    ):
        super().__init__()
        self.num_stages = stages = len(layers) // 2
        self.cls_mode = cls_mode
        norm_fn = functools.partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)
        self.conv_input = spconv.SparseSequential(
            spconv.SubMConv3d(in_channels, base_channels, kernel_size=5, padding=1, bias=False, indice_key="stem"),
            norm_fn(base_channels),
            nn.ReLU(),
        )
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.enc, self.dec = nn.ModuleList(), None if cls_mode else nn.ModuleList()
        encoder, decoder = base_channels, channels[-1]
        for s in range(stages):
            self.down.append(
                spconv.SparseSequential(
                    spconv.SparseConv3d(
                        encoder, channels[s], kernel_size=2, stride=2, bias=False, indice_key=f"spconv{s + 1}"
                    ),
                    norm_fn(channels[s]),
                    nn.ReLU(),
                )
            )
            blocks = [
                (f"block{i}", BasicBlock(channels[s], channels[s], norm_fn, f"subm{s + 1}")) for i in range(layers[s])
            ]
            self.enc.append(spconv.SparseSequential(OrderedDict(blocks)))
            if not cls_mode:
                self.up.append(
                    spconv.SparseSequential(
                        spconv.SparseInverseConv3d(
                            channels[len(channels) - s - 2],
                            decoder,
                            kernel_size=2,
                            bias=False,
                            indice_key=f"spconv{s + 1}",
                        ),
                        norm_fn(decoder),
                        nn.ReLU(),
                    )
                )
                widths = [decoder + encoder, *[decoder] * (layers[len(channels) - s - 1] - 1)]
                blocks = [
                    (f"block{i}", BasicBlock(width, decoder, norm_fn, f"subm{s}")) for i, width in enumerate(widths)
                ]
                self.dec.append(spconv.SparseSequential(OrderedDict(blocks)))
            encoder, decoder = channels[s], channels[len(channels) - s - 2]
        final = channels[-1] if not cls_mode else channels[stages - 1]
        self.final = spconv.SubMConv3d(final, num_classes, kernel_size=1, padding=1, bias=True)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, spconv.SubMConv3d)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0)
        elif isinstance(module, nn.BatchNorm1d):
            nn.init.constant_(module.bias, 0)
            nn.init.constant_(module.weight, 1.0)

    def forward(self, input_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        grid_coord, feat = input_dict["grid_coord"], input_dict["feat"]
        batch = offset2batch(input_dict["offset"])
        sparse_shape = torch.add(torch.max(grid_coord, dim=0).values, 96).tolist()
        x = spconv.SparseConvTensor(
            features=feat,
            indices=torch.cat([batch.unsqueeze(-1).int(), grid_coord.int()], dim=1).contiguous(),
            spatial_shape=sparse_shape,
            batch_size=batch[-1].tolist() + 1,
        )
        x = self.conv_input(x)
        skips = [x]
        for s in range(self.num_stages):
            x = self.enc[s](self.down[s](x))
            skips.append(x)
        x = skips.pop(-1)
        if self.cls_mode:
            # One row per batch item from here on; the sites stay as they are.
            rows = x.indices[:, 0].long()
            pooled = x.features.new_zeros(x.batch_size, x.features.shape[1])
            pooled = pooled.index_add(0, rows, x.features)
            count = torch.bincount(rows, minlength=x.batch_size).clamp(min=1)
            x = x.replace_feature(pooled / count.unsqueeze(1).to(pooled.dtype))
        else:
            for s in reversed(range(self.num_stages)):
                x = self.up[s](x)
                skip = skips.pop(-1)
                x = x.replace_feature(torch.cat((x.features, skip.features), dim=1))
                x = self.dec[s](x)
        return self.final(x).features


def build(in_channels: int = 6, num_classes: int = 20, cls_mode: bool = False) -> nn.Module:
    return SpUNetBase(in_channels, num_classes, cls_mode=cls_mode)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return (
        {
            "coord": scene.points.to(device),
            "grid_coord": scene.coords[:, 1:].long().to(device),
            "feat": scene.features.to(device, dtype),
            "offset": offsets(scene).to(device),
        },
    )
