"""Shape completion and reconstruction, as the examples of MinkowskiEngine define them.

Source: layer stack S26 of the usage notes. Both grow coordinates with generative transposed
convolutions and prune them by predicted occupancy; completion joins its encoder by unions.
"""

from __future__ import annotations

import itertools

import MinkowskiEngine as ME
import torch
from torch import nn

CHANNELS = (16, 32, 64, 128, 256, 512, 1024)


def norm_elu(width):
    return [ME.MinkowskiBatchNorm(width), ME.MinkowskiELU()]


def conv(before, width, kernel_size, stride=1, bias=False):
    return ME.MinkowskiConvolution(before, width, kernel_size=kernel_size, stride=stride, bias=bias, dimension=3)


def generate(before, width, kernel_size=2):
    return ME.MinkowskiGenerativeConvolutionTranspose(before, width, kernel_size=kernel_size, stride=2, dimension=3)


class Generator(nn.Module):
    """What both networks know about targets."""

    def __init__(self):
        super().__init__()
        self.pruning = ME.MinkowskiPruning()

    @torch.no_grad()
    def get_target(self, out, target_key, kernel_size=1):
        """Rows of `out` at which the target shape has voxels."""
        target = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        cm = out.coordinate_manager
        strided_target_key = cm.stride(target_key, out.tensor_stride[0])
        kernel_map = cm.kernel_map(out.coordinate_map_key, strided_target_key, kernel_size=kernel_size, region_type=1)
        for curr_in in kernel_map.values():
            target[curr_in[0].long()] = 1
        return target

    def grow(self, out, head, target_key):
        """(pruned tensor, occupancy logits, target)"""
        out_cls = head(out)
        target = self.get_target(out, target_key)
        keep = self.plausible(out_cls.F.squeeze(1), target)
        if self.training:
            keep += target
        return self.pruning(out, keep), out_cls, target

    def plausible(self, logits, target):
        """Positive logits. Untrained networks may find all positive, or none, and would grow
        eightfold per level: then the largest ones, twice as many as the shape has voxels."""
        keep = logits > 0
        limit = min(max(2 * int(target.sum()), 8), len(logits))
        if not 0 < keep.sum() <= limit:
            keep = torch.zeros_like(keep)
            keep[logits.topk(limit).indices] = True
        return keep


class CompletionNet(Generator):
    """Strides 1 to 64 and back."""

    ENC_CHANNELS = CHANNELS
    DEC_CHANNELS = CHANNELS

    def __init__(self, in_nchannel=1):
        super().__init__()
        enc, dec = self.ENC_CHANNELS, self.DEC_CHANNELS
        self.strides = [2**level for level in range(len(enc))]
        self.enc_block_s1 = nn.Sequential(conv(in_nchannel, enc[0], 3), *norm_elu(enc[0]))
        for level in range(len(enc) - 1):
            before, width = enc[level], enc[level + 1]
            fine, coarse = self.strides[level : level + 2]
            down = nn.Sequential(conv(before, width, 2, 2), *norm_elu(width), conv(width, width, 3), *norm_elu(width))
            setattr(self, f"enc_block_s{fine}s{coarse}", down)
            first = level == len(enc) - 2
            up = nn.Sequential(
                generate(enc[-1] if first else dec[level + 1], dec[level], 4 if first else 2),
                *norm_elu(dec[level]),
                conv(dec[level], dec[level], 3),
                *norm_elu(dec[level]),
            )
            setattr(self, f"dec_block_s{coarse}s{fine}", up)
            setattr(self, f"dec_s{coarse}s{fine}_cls", conv(dec[level], 1, 1, bias=True))

    def forward(self, partial_in, target_key):
        encoded = [self.enc_block_s1(partial_in)]
        pairs = list(itertools.pairwise(self.strides))
        for fine, coarse in pairs:
            encoded.append(getattr(self, f"enc_block_s{fine}s{coarse}")(encoded[-1]))

        out_cls, targets = [], []
        out = encoded.pop()
        for fine, coarse in reversed(pairs):
            out = getattr(self, f"dec_block_s{coarse}s{fine}")(out) + encoded.pop()
            head = getattr(self, f"dec_s{coarse}s{fine}_cls")
            out, logits, target = self.grow(out, head, target_key)
            out_cls.append(logits)
            targets.append(target)
        return out_cls, targets, out


class GenerativeNet(Generator):
    """A code per shape at the coarsest stride becomes the shape."""

    CHANNELS = CHANNELS[::-1]

    def __init__(self, resolution=64, in_nchannel=1024):
        super().__init__()
        self.resolution = resolution
        ch = self.CHANNELS
        self.block1 = nn.Sequential(
            generate(in_nchannel, ch[0]),
            *norm_elu(ch[0]),
            conv(ch[0], ch[0], 3),
            *norm_elu(ch[0]),
            generate(ch[0], ch[1]),
            *norm_elu(ch[1]),
            conv(ch[1], ch[1], 3),
            *norm_elu(ch[1]),
        )
        self.block1_cls = conv(ch[1], 1, 1, bias=True)
        self.blocks = resolution.bit_length() - 2
        for index in range(2, self.blocks + 1):
            before, width = ch[index - 1], ch[index]
            block = nn.Sequential(generate(before, width), *norm_elu(width), conv(width, width, 3), *norm_elu(width))
            setattr(self, f"block{index}", block)
            setattr(self, f"block{index}_cls", conv(width, 1, 1, bias=True))

    def forward(self, z_in, target_key):
        out_cls, targets, out = [], [], z_in
        for index in range(1, self.blocks + 1):
            out = getattr(self, f"block{index}")(out)
            head = getattr(self, f"block{index}_cls")
            out, logits, target = self.grow(out, head, target_key)
            out_cls.append(logits)
            targets.append(target)
        return out_cls, targets, out


def build(in_nchannel=1):
    return CompletionNet(in_nchannel)


def shape(scene, device):
    """Voxels of the shapes, at most 128 along each axis, in the order of their coordinates."""
    coords = scene.coords.clone()
    for item in range(scene.batch_size):
        places = coords[coords[:, 0] == item, 1:]
        if len(places):
            extent = int((places.max(0).values - places.min(0).values).max()) + 1
            coords[coords[:, 0] == item, 1:] = places // -(-extent // 128)
    return coords.unique(dim=0).to(device)


def batch(scene, device, dtype):
    """(the part of a shape below a plane, key of the whole shape)"""
    whole = shape(scene, device)
    low = whole[:, 3] <= whole[:, 3].float().mean()
    first = torch.zeros_like(low)
    starts = [(whole[:, 0] == item).nonzero()[:1, 0] for item in range(scene.batch_size)]
    first[torch.cat(starts)] = True  # nobody loses all voxels
    part = whole[low | first].contiguous()
    features = torch.ones(len(part), 1).to(device, dtype)
    partial_in = ME.SparseTensor(features=features, coordinates=part)
    target_key, _ = partial_in.coordinate_manager.insert_and_map(whole, string_id="target")
    return partial_in, target_key


def outputs(result):
    out_cls, _, out = result
    return [*out_cls, out]


def loss(result):
    """The examples' mean of the binary cross entropies of the levels."""
    out_cls, targets, _ = result
    terms = [
        nn.functional.binary_cross_entropy_with_logits(level.F.squeeze(1), target.to(level.F.dtype))
        for level, target in zip(out_cls, targets, strict=True)
    ]
    return sum(terms) / len(terms)
