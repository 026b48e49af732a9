"""A small network as a project would write it, and the ways in which it can be made to go wrong."""

from __future__ import annotations

import os
import time

import spconv.pytorch as spconv
import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self, width=8, fault=None, bias=False):
        super().__init__()
        self.fault = fault
        self.body = spconv.SparseSequential(
            spconv.SubMConv3d(4, width, 3, bias=bias, indice_key="subm1"),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            spconv.SparseConv3d(width, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm1d(width),
        )
        if fault == "idle":
            self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        if self.fault == "raise":
            raise RuntimeError("the toy broke, as asked")
        if self.fault == "nan":
            x = x.replace_feature(x.features * float("nan"))
        if self.fault == "train" and self.training and torch.is_grad_enabled():
            x = x.replace_feature(x.features.detach() + time.sleep(0) or x.features)
            raise MemoryError("no room for gradients")
        if self.fault in ("crash", "hang") and not self.training:
            print("the toy is about to", self.fault)
            os.abort() if self.fault == "crash" else time.sleep(600)
        return self.body(x)


def build(**options):
    return Toy(**options)


def batch(scene, device, dtype):
    features = scene.features.to(device, dtype)
    indices = scene.coords[:, [0, 3, 2, 1]].contiguous().to(device)
    return (spconv.SparseConvTensor(features, indices, list(scene.grid[::-1]), scene.batch_size),)
