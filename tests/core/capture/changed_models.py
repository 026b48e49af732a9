"""Models with Python state of their own, and what programs change while they run; for `test_changed_programs`."""

from __future__ import annotations

import torch
from torch import nn

from .apis import Layers, Network

ALPHA = 1.0
SEEN = []


class Scaled(Network):
    """Reads an attribute, a global, a closure and a configuration."""

    def __init__(self, layers, more):
        super().__init__(layers)
        self.scale, self.cfg, self.more, self.calls = 1.0, {"weights": [1.0, 2.0]}, more, 0

    def forward(self, x):
        out = super().forward(x)
        factor = self.scale * ALPHA * self.cfg["weights"][1] * self.more()
        return {"out": out["out"].replace_feature(out["out"].features * factor), "deep": out["deep"]}


class Counts(Scaled):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Appends(Scaled):
    def forward(self, x):
        SEEN.append(len(x.spatial_shape))
        return super().forward(x)


class Prints(Scaled):
    def forward(self, x):
        print("a call")
        return super().forward(x)


class Branches(Scaled):
    def forward(self, x):
        out = super().forward(x)
        return out if out["out"].features.max() > 0 else {"out": out["out"], "deep": out["deep"]}


def made(module, cls, cell):
    """A model whose closure reads the cell."""
    return cls(Layers(module, "spconv"), lambda: cell[0])


def attribute(model, cell):
    model.scale = 0.5


def closure(model, cell):
    cell[0] = 3.0


def configuration(model, cell):
    model.cfg["weights"][1] = 7.0


def global_value(model, cell):
    global ALPHA
    ALPHA = 0.25


def parameter_replaced(model, cell):
    model.deep.weight = nn.Parameter(model.deep.weight.detach() * 0.5)


def parameter_data(model, cell):
    model.deep.weight.data = model.deep.weight.data * 0.5


def parameter_in_place(model, cell):
    model.deep.weight.data.mul_(0.5)


def module_replaced(model, cell):
    setattr(model.down, "2", nn.LeakyReLU(0.1))


def hook(model, cell):
    model.deep.register_forward_hook(lambda module, args, out: out.replace_feature(out.features + 1))


def frozen(model, cell):
    model.stem.requires_grad_(False)


def norm_numbers(model, cell):
    model.down[1].eps, model.down[1].momentum = 1e-2, 0.5


def forward_of_the_class(model, cell):
    own = torch.nn.LeakyReLU.forward
    model.down[2].__class__ = type("Leaky", (nn.LeakyReLU,), {"forward": own})
    model.down[2].negative_slope = 0.2


CHANGES = {
    change.__name__: change
    for change in (
        attribute,
        closure,
        configuration,
        global_value,
        parameter_replaced,
        parameter_data,
        parameter_in_place,
        module_replaced,
        hook,
        frozen,
        norm_numbers,
        forward_of_the_class,
    )
}
