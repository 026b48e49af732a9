"""Reconstruction of shapes from a code, as the examples of MinkowskiEngine define it.

Source: layer stack S26 of the usage notes; the network stands beside the completion network.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch

from .completion import GenerativeNet, shape
from .completion import loss as loss
from .completion import outputs as outputs

RESOLUTION = 64


def build(**options):
    return GenerativeNet(RESOLUTION, **options)


def batch(scene, device, dtype, in_nchannel=1024):
    """(a dense code per shape in each of its coarsest cells, key of the shapes)"""
    whole = shape(scene, device)
    cells = whole.clone()
    cells[:, 1:] = cells[:, 1:] // RESOLUTION * RESOLUTION
    cells = cells.unique(dim=0)
    codes = torch.sin(torch.arange(scene.batch_size * in_nchannel).view(-1, in_nchannel) * 0.7)
    code = codes.to(device, dtype)[cells[:, 0].long()]
    z_in = ME.SparseTensor(features=code, coordinates=cells, tensor_stride=RESOLUTION)
    target_key, _ = z_in.coordinate_manager.insert_and_map(whole, string_id="target")
    return z_in, target_key
