"""Published networks that make and drop coordinates; written as those of `networks`."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from .networks import basic_block

__all__ = ["FCAF3D", "PCGC", "Completion"]


class FCAF3D(nn.Module):
    """Backbone, neck and head; `keep` voxels per item survive each pruning."""

    def __init__(
        self,
        ME,
        in_channels=3,
        widths=(64, 64, 128, 256, 512),
        counts=(3, 4, 6, 3),
        out=128,
        classes=18,
        n_reg=6,
        keep=200,
    ):
        super().__init__()
        self.ME, self.keep = ME, keep
        conv, norm, elu = ME.MinkowskiConvolution, ME.MinkowskiBatchNorm, ME.MinkowskiELU
        self.conv1 = nn.Sequential(
            conv(in_channels, widths[0], kernel_size=3, stride=2, dimension=3),
            ME.MinkowskiInstanceNorm(widths[0]),
            ME.MinkowskiReLU(inplace=True),
            ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3),
        )
        before = widths[0]
        for i, (width, n) in enumerate(zip(widths[1:], counts, strict=True), 1):
            blocks = [basic_block(ME, before, width, 2)]
            blocks += [basic_block(ME, width, width) for _ in range(n - 1)]
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
            before = width
        for i, width in enumerate(widths[1:]):
            if i > 0:
                self.add_module(
                    f"up_block_{i}",
                    nn.Sequential(
                        ME.MinkowskiGenerativeConvolutionTranspose(
                            width, widths[i], kernel_size=2, stride=2, dimension=3
                        ),
                        norm(widths[i]),
                        elu(),
                        conv(widths[i], widths[i], kernel_size=3, dimension=3),
                        norm(widths[i]),
                        elu(),
                    ),
                )
            self.add_module(
                f"out_block_{i}", nn.Sequential(conv(width, out, kernel_size=3, dimension=3), norm(out), elu())
            )
        self.centerness_conv = conv(out, 1, kernel_size=1, dimension=3)
        self.reg_conv = conv(out, n_reg, kernel_size=1, dimension=3)
        self.cls_conv = conv(out, classes, kernel_size=1, bias=True, dimension=3)
        self.pruning = ME.MinkowskiPruning()

    def forward(self, x):
        x = self.conv1(x)
        inputs = []
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
            inputs.append(x)
        found, x, scores = [], inputs[-1], None
        for i in range(3, -1, -1):
            if i < 3:
                x = getattr(self, f"up_block_{i + 1}")(x)
                x = inputs[i] + x
                x = self.prune(x, scores)
            y = getattr(self, f"out_block_{i}")(x)
            cls = self.cls_conv(y)
            scores = self.ME.SparseTensor(
                cls.features.max(dim=1, keepdim=True).values,
                coordinate_map_key=cls.coordinate_map_key,
                coordinate_manager=cls.coordinate_manager,
            )
            found.append((self.centerness_conv(y), self.reg_conv(y), cls))
        return found

    def prune(self, x, scores):
        with torch.no_grad():
            values = scores.features_at_coordinates(x.C.to(x.F.dtype))
            mask = torch.zeros(len(x), dtype=torch.bool, device=x.F.device)
            for rows in x.decomposition_permutations:
                score = values[rows, 0]
                kept = torch.topk(score, min(len(score), self.keep), sorted=False).indices
                mask[rows[kept]] = True
        return self.pruning(x, mask)


class Completion(nn.Module):
    """Encoder, then generative upsampling joined with the encoder by union sums and pruned."""

    def __init__(self, ME, widths=(16, 32, 64, 128, 256, 512, 1024)):
        super().__init__()
        self.ME = ME

        def norm_elu(width):
            return [ME.MinkowskiBatchNorm(width), ME.MinkowskiELU()]

        def conv(i, o, k, s=1, bias=False):
            return ME.MinkowskiConvolution(i, o, kernel_size=k, stride=s, bias=bias, dimension=3)

        self.enc = nn.ModuleList([nn.Sequential(conv(1, widths[0], 3), *norm_elu(widths[0]))])
        for a, b in itertools.pairwise(widths):
            down = [conv(a, b, 2, 2), *norm_elu(b), conv(b, b, 3), *norm_elu(b)]
            self.enc.append(nn.Sequential(*down))
        self.dec, self.cls = nn.ModuleList(), nn.ModuleList()
        for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True):
            k = 4 if a == widths[-1] else 2
            up = ME.MinkowskiGenerativeConvolutionTranspose(a, b, kernel_size=k, stride=2, dimension=3)
            self.dec.append(nn.Sequential(up, *norm_elu(b), conv(b, b, 3), *norm_elu(b)))
            self.cls.append(conv(b, 1, 1, bias=True))
        self.pruning = ME.MinkowskiPruning()

    def forward(self, x, wanted):
        """wanted(occupancy tensor) -> bool rows that must stay. Returns occupancies and output."""
        skips = []
        for stage in self.enc:
            x = stage(x)
            skips.append(x)
        skips.pop()
        found = []
        for stage, head in zip(self.dec, self.cls, strict=True):
            x = stage(x) + skips.pop()
            occupied = head(x)
            found.append(occupied)
            keep = (occupied.F > 0).squeeze(1) | wanted(occupied)
            if keep.any():
                x = self.pruning(x, keep)
        return found, x


class _Inception(nn.Module):
    """PCGCv2's Inception-ResNet."""

    def __init__(self, ME, width):
        super().__init__()
        self.ME = ME

        def conv(i, o, k):
            return ME.MinkowskiConvolution(i, o, kernel_size=k, stride=1, bias=True, dimension=3)

        self.conv0_0, self.conv0_1 = conv(width, width // 4, 3), conv(width // 4, width // 2, 3)
        self.conv1_0, self.conv1_1 = conv(width, width // 4, 1), conv(width // 4, width // 4, 3)
        self.conv1_2 = conv(width // 4, width // 2, 1)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        a = self.conv0_1(self.relu(self.conv0_0(x)))
        b = self.conv1_2(self.relu(self.conv1_1(self.relu(self.conv1_0(x)))))
        return self.ME.cat(a, b) + x


class PCGC(nn.Module):
    """PCGCv2 codec: encoder to 8 channels at stride 8, generative decoder with top-k pruning."""

    def __init__(self, ME, widths=(16, 32, 64, 32, 8), up_widths=(64, 32, 16)):
        super().__init__()
        self.ME = ME
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.pruning = ME.MinkowskiPruning()

        def conv(i, o, k=3, s=1):
            return ME.MinkowskiConvolution(i, o, kernel_size=k, stride=s, bias=True, dimension=3)

        def inceptions(width):
            return nn.Sequential(*[_Inception(ME, width) for _ in range(3)])

        a, b, c, d, e = widths
        self.encoder = nn.ModuleList(
            [
                nn.ModuleList([conv(1, a), conv(a, b, 2, 2), inceptions(b)]),
                nn.ModuleList([conv(b, b), conv(b, c, 2, 2), inceptions(c)]),
                nn.ModuleList([conv(c, c), conv(c, d, 2, 2), inceptions(d)]),
            ]
        )
        self.bottleneck = conv(d, e)
        self.decoder = nn.ModuleList()
        before = e
        for width in up_widths:
            up = ME.MinkowskiGenerativeConvolutionTranspose(
                before, width, kernel_size=2, stride=2, bias=True, dimension=3
            )
            stage = [up, conv(width, width), inceptions(width), conv(width, 1)]
            self.decoder.append(nn.ModuleList(stage))
            before = width

    def forward(self, x):
        """(latent, [occupancy logits of every level], decoded tensor)."""
        counts = []
        for first, down, rest in self.encoder:
            counts.append([len(rows) for rows in x.decomposition_permutations])
            x = rest(self.relu(down(self.relu(first(x)))))
        latent = x = self.bottleneck(x)
        found = []
        for up, conv, rest, head in self.decoder:
            x = rest(self.relu(conv(self.relu(up(x)))))
            logits = head(x)
            found.append(logits)
            x = self.pruning(x, self.largest(logits, counts.pop()))
        return latent, found, x

    def largest(self, x, counts):
        mask = torch.zeros(len(x), dtype=torch.bool, device=x.F.device)
        for rows, n in zip(x.decomposition_permutations, counts, strict=True):
            score = x.F.detach()[rows, 0]
            mask[rows[torch.topk(score, min(n, len(score))).indices]] = True
        return mask
