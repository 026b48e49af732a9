"""Mask3D: Res16UNet34C and a decoder of masks that reads every level of it.

Source: layer stack S27 of the usage notes. Queries are learned; of each level a fixed share of
the voxels is read, evenly spread instead of drawn.
"""

from __future__ import annotations

import MinkowskiEngine.MinkowskiOps as me
import torch
from MinkowskiEngine import SparseTensor
from MinkowskiEngine.MinkowskiPooling import MinkowskiAvgPooling
from torch import nn

from .res16unet import Layers, Res16UNet34C


class DecoderLayer(nn.Module):
    """Masked attention to the voxels, attention among the queries, feed-forward."""

    def __init__(self, channels, heads, dim_feedforward):
        super().__init__()
        self.cross_attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.self_attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(channels, dim_feedforward), nn.ReLU(), nn.Linear(dim_feedforward, channels))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))

    def forward(self, queries, voxels, position, mask):
        found, _ = self.cross_attention(queries, voxels + position, voxels, attn_mask=mask)
        queries = self.norms[0](queries + found)
        found, _ = self.self_attention(queries, queries, queries)
        queries = self.norms[1](queries + found)
        return self.norms[2](queries + self.ffn(queries))


class Mask3D(nn.Module):
    def __init__(
        self,
        in_channels=3,
        num_classes=19,
        hidden_dim=128,
        num_queries=100,
        num_heads=8,
        dim_feedforward=1024,
        sample_sizes=(200, 800, 3200, 12800),
    ):
        super().__init__()
        self.num_heads, self.sample_sizes = num_heads, sample_sizes
        self.backbone = Res16UNet34C(in_channels, num_classes)
        sizes = [self.backbone.PLANES[level] for level in (3, 4, 5, 6)]
        self.mask_features_head = Layers.conv(
            self.backbone.PLANES[7], hidden_dim, kernel_size=1, stride=1, bias=True, D=3
        )
        self.pooling = MinkowskiAvgPooling(kernel_size=2, stride=2, dimension=3)
        self.query_feat = nn.Embedding(num_queries, hidden_dim)
        self.position = nn.Linear(3, hidden_dim)
        self.lin_squeeze = nn.ModuleList(nn.Linear(width, hidden_dim) for width in sizes)
        self.decoder = nn.ModuleList(DecoderLayer(hidden_dim, num_heads, dim_feedforward) for _ in sizes)
        self.decoder_norm = nn.LayerNorm(hidden_dim)
        self.mask_embed_head = nn.Sequential(
            nn.Linear(hidden_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)
        )
        self.class_embed_head = nn.Linear(hidden_dim, num_classes)

    def pooled_positions(self, raw_coordinates, finest, levels):
        """Mean raw positions, coarse to fine, per item of the batch."""
        coordinates = me.SparseTensor(
            features=raw_coordinates,
            coordinate_manager=finest.coordinate_manager,
            coordinate_map_key=finest.coordinate_map_key,
            device=finest.device,
        )
        coords = [coordinates]
        for _ in range(levels - 1):
            coords.append(self.pooling(coords[-1]))
        coords.reverse()
        return [level.decomposed_features for level in coords]

    def mask_module(self, queries, mask_features, pooling_steps):
        queries = self.decoder_norm(queries)
        embeddings = self.mask_embed_head(queries)
        output_masks = [
            features @ embedding.T
            for features, embedding in zip(mask_features.decomposed_features, embeddings, strict=False)
        ]
        rows = torch.cat(mask_features.decomposition_permutations)
        order = torch.empty_like(rows)
        order[rows] = torch.arange(len(rows), device=rows.device)
        masks = me.SparseTensor(
            features=torch.cat(output_masks)[order],
            coordinate_manager=mask_features.coordinate_manager,
            coordinate_map_key=mask_features.coordinate_map_key,
        )
        attn_mask = masks
        for _ in range(pooling_steps):
            attn_mask = self.pooling(attn_mask.float())
        attn_mask = SparseTensor(
            features=(attn_mask.F.detach().sigmoid() < 0.5),
            coordinate_manager=attn_mask.coordinate_manager,
            coordinate_map_key=attn_mask.coordinate_map_key,
        )
        return self.class_embed_head(queries), masks, attn_mask

    def _padded(self, tensors, size):
        """[items, length, channels] with at most `size` rows of each tensor, evenly spread."""
        length = max(1, min(size, max(len(tensor) for tensor in tensors)))
        padded = tensors[0].new_zeros((len(tensors), length, tensors[0].shape[1]))
        for item, tensor in enumerate(tensors):
            if len(tensor) > length:
                chosen = torch.arange(length, device=tensor.device) * len(tensor) // length
                tensor = tensor[chosen]
            padded[item, : len(tensor)] = tensor
        return padded

    def forward(self, x, raw_coordinates):
        """x: colours on the voxels; raw_coordinates: float [N, 3], one position per voxel."""
        pcd_features, aux = self.backbone(x)
        positions = self.pooled_positions(raw_coordinates, aux[-1], len(aux))
        mask_features = self.mask_features_head(aux[-1])
        items = len(mask_features.decomposed_features)
        queries = self.query_feat.weight.unsqueeze(0).expand(items, -1, -1)

        classes, masks = [], []
        for level, size in enumerate(self.sample_sizes):
            steps = len(aux) - level - 1
            output_class, output_mask, attn_mask = self.mask_module(queries, mask_features, steps)
            classes.append(output_class)
            masks.append(output_mask)
            mask = self._padded([~m for m in attn_mask.decomposed_features], size)
            mask = ~mask.permute(0, 2, 1)  # True: not to be read
            mask[mask.all(dim=-1)] = False
            voxels = self._padded(aux[level].decomposed_features, size)
            position = self._padded(positions[level], size)
            queries = self.decoder[level](
                queries,
                self.lin_squeeze[level](voxels),
                self.position(position),
                mask.repeat_interleave(self.num_heads, dim=0),
            )
        output_class, output_mask, _ = self.mask_module(queries, mask_features, 0)
        classes.append(output_class)
        masks.append(output_mask)
        return {"pred_logits": classes, "pred_masks": masks, "backbone_features": pcd_features}


def build(**options):
    return Mask3D(**options)


def batch(scene, device, dtype):
    """(SparseTensor of colours, raw position of each voxel)."""
    x = SparseTensor(scene.features.to(device, dtype), coordinates=scene.coords.to(device))
    return x, scene.points.to(device, dtype)
