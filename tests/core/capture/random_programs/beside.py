"""What stands beside layers in programs: functions of features, coordinates, batch items and other inputs."""

from __future__ import annotations

import torch
from torch import nn

DENSE = (3, 5)  # of the tensor that is given beside a sparse one: a row per batch item


class Function(nn.Module):
    """text: what it does, for a reader of a failing program."""

    def __init__(self, way, width, out):
        super().__init__()
        self.way = way
        if way in ("linear", "gate"):
            self.layer = nn.Linear(width, width if way == "gate" else out)
        elif way == "places":
            self.layer = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, width))
        elif way == "layer norm":
            self.layer = nn.LayerNorm(width)
        elif way == "given rows":
            self.layer = nn.Linear(DENSE[1], width)
        elif way == "table":
            self.layer = nn.Embedding(8, width)
        if way == "buffers":
            self.register_buffer("factor", torch.rand(width) + 0.5)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.numbers = [0.5, 0.25, 2.0]

    def extra_repr(self):
        return self.way

    def forward(self, features, places, items, beside):
        return getattr(self, "_" + self.way.replace(" ", "_"))(features, places, items, beside)

    def _linear(self, features, places, items, beside):
        return self.layer(features)

    def _gate(self, features, places, items, beside):
        return features * torch.sigmoid(self.layer(features))

    def _places(self, features, places, items, beside):
        return features + self.layer(places.to(features.dtype) * 0.1)

    def _layer_norm(self, features, places, items, beside):
        return self.layer(features)

    def _softmax(self, features, places, items, beside):
        return torch.softmax(features, 1)

    def _unit_rows(self, features, places, items, beside):
        return features / (features.norm(dim=1, keepdim=True) + 1)

    def _largest(self, features, places, items, beside):
        return features - features.amax(1, keepdim=True) * (places[:, :1] % 2 == 0)

    def _buffers(self, features, places, items, beside):
        self.calls.add_(1)
        return features * self.factor

    def _constants(self, features, places, items, beside):
        numbers = torch.tensor(self.numbers, device=features.device, dtype=features.dtype)
        return features * (1 + 0.1 * (places.to(features.dtype) * 0.1 * numbers).sum(1, keepdim=True))

    def _table(self, features, places, items, beside):
        return features + self.layer(places[:, 0].clamp(0, 7).long()).to(features.dtype)

    def _given_rows(self, features, places, items, beside):
        return features + self.layer(beside.dense)[items].to(features.dtype)

    def _given_number(self, features, places, items, beside):
        return features if beside.scale is None else features * beside.scale

    def _item_means(self, features, places, items, beside):
        sums = features.new_zeros(3, features.shape[1]).index_add(0, items, features)
        counts = features.new_zeros(3).index_add(0, items, torch.ones_like(features[:, 0]))
        return features - (sums / counts.clamp(min=1)[:, None])[items]

    def _all_rows(self, features, places, items, beside):
        return features - features.mean(0, keepdim=True)

    def _in_half(self, features, places, items, beside):
        return (features.half() * 2).to(features.dtype)

    def _masked(self, features, places, items, beside):
        return features.masked_fill(features < -1, 0).clamp(max=3)

    def _parts(self, features, places, items, beside):
        one, other = features.split([1, features.shape[1] - 1], 1)
        return torch.cat([other.tanh(), one], 1)


OFTEN = ("linear", "gate", "places", "layer norm", "softmax", "unit rows", "largest", "constants", "table")
OFTEN += ("given number", "in half", "masked", "parts", "buffers")
REFUSED = ("item means", "all rows", "given rows")  # what mixes rows, or takes another tensor, is not replayed
