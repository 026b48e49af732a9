"""What a random program consists of: steps in a row, which make sparse tensors of earlier ones, and parts of steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from sparse_bridge.adapters import protocol


class Beside(NamedTuple):
    """What a part is given beside its sparse tensor: a tensor of the same shape in all calls, and a number or None."""

    dense: torch.Tensor
    scale: float | None = None


class Tensors:
    """How programs of a framework read and make its sparse tensors."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        self.batch_column = 3 if name in ("torchsparse 2.0", "torchsparse 1.4") else 0

    def __deepcopy__(self, memo):
        return self  # a framework has no copies

    def features(self, x):
        return x.features if self.name == "spconv" else x.F

    def coordinates(self, x):
        return x.indices if self.name == "spconv" else x.C

    def with_features(self, x, features):
        if self.name == "spconv":
            return x.replace_feature(features)
        if self.name == "minkowski":
            make, place = self.module.SparseTensor, x.coordinate_map_key
            return make(features, coordinate_map_key=place, coordinate_manager=x.coordinate_manager)
        return protocol.of(x).with_features(x, features)

    def join(self, way, *given):
        """Tensors of the same rows, added or side by side."""
        features = [self.features(x) for x in given]
        if way == "add":
            return given[0] + given[1] if self.name != "spconv" else given[0].replace_feature(features[0] + features[1])
        if self.name == "spconv":
            return self.with_features(given[0], torch.cat(features, 1))
        return self.module.cat(list(given)) if self.name != "minkowski" else self.module.cat(*given)


class Layer(nn.Module):
    """A layer of the framework, or several in a row, over an earlier result."""

    def __init__(self, layer, source):
        super().__init__()
        self.layer, self.source = layer, source

    def forward(self, results, beside):
        return self.layer(results[self.source])


class OnFeatures(nn.Module):
    """What stands beside layers: a function of features, coordinates, batch items and what else is given."""

    def __init__(self, tensors, function, source):
        super().__init__()
        self.tensors, self.function, self.source = tensors, function, source

    def forward(self, results, beside):
        x, column = results[self.source], self.tensors.batch_column
        coords = self.tensors.coordinates(x)
        places = coords[:, :3] if column else coords[:, 1:]
        features = self.function(self.tensors.features(x), places, coords[:, column].long(), beside)
        return self.tensors.with_features(x, features)


class Joined(nn.Module):
    """Earlier results of the same rows, added or side by side."""

    def __init__(self, tensors, way, sources):
        super().__init__()
        self.tensors, self.way, self.sources = tensors, way, sources

    def forward(self, results, beside):
        return self.tensors.join(self.way, *[results[source] for source in self.sources])


class Part(nn.Module):
    """Steps in a row. also: numbers of earlier results that are returned besides.  structure: what they are returned
    in.  extra: whether features are returned, too, or spconv's dense tensor."""

    def __init__(self, tensors, steps=(), also=(), structure="list", extra=None):
        super().__init__()
        self.tensors, self.steps = tensors, nn.ModuleList(steps)
        self.also, self.structure, self.extra = list(also), structure, extra

    def forward(self, x, dense=None, scale=None):
        results = [x]
        for step in self.steps:
            results.append(step(results, Beside(dense, scale)))
        y, more = results[-1], [results[number] for number in self.also]
        if self.extra == "features":
            more.append(self.tensors.features(y) * 2)
        if self.extra == "dense":
            more.append(y.dense())
        if self.structure == "one":
            return y
        if self.structure == "list":
            return [y, *more]
        if self.structure == "tuple":
            return y, tuple(more)
        if self.structure == "dict":
            return {"out": y, **{f"more{number}": one for number, one in enumerate(more)}}
        return {"out": y, "more": [{"one": one} for one in more], "nothing": None}


class Whole(nn.Module):
    """Parts in a row as one module."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, dense=None, scale=None):
        results = []
        for part in self.parts:
            results.append(part(x, dense, scale))
            x = results_in(results[-1])[0]
        return results


def results_in(output):
    """The tensors of a part's output, sparse or not, the last step's first."""
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [one for value in output for one in results_in(value)]
    return [] if output is None else [output]
