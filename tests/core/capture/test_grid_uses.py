"""What a program does with the grid of a sparse tensor is seen, however it goes about it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import sys

import numpy as np
import pytest
import torch

from sparse_bridge.core.closed_world.grid_uses import GRID
from tests.adapters.spconv import apis as spconv_apis

from .test_bounds_of_scenes import Reads
from .test_closed_world import audited

# Each computes features of a scene by its grid or batch items.


def closure(x):
    high = x.spatial_shape[0]

    def scale():
        return 2.0 if high > 40 else 1.0

    return x.features * scale()


def default(x):
    def scale(high=x.spatial_shape[0]):
        return 2.0 if high > 40 else 1.0

    return x.features * scale()


def by_partial(x):
    return x.features * functools.partial(pick, x.spatial_shape[0])()


def pick(high):
    return 2.0 if high > 40 else 1.0


def called_lambda(x):
    high = x.spatial_shape[0]
    return x.features * (lambda: 2.0 if high > 40 else 1.0)()


def default_of_a_lambda(x):
    return x.features * (lambda high=x.spatial_shape[0]: 2.0 if high > 40 else 1.0)()


def mapped(x):
    return x.features * next(map(pick, x.spatial_shape))


def compared_by_operator(x):
    return x.features * (2 if operator.gt(x.spatial_shape[0], 40) else 1)


def added_comparison(x):
    return x.features * (1 + operator.gt(x.spatial_shape[0], 40))


def boolean(x):
    return x.features * (1 + (x.spatial_shape[0] > 40))


def largest_of_numpy(x):
    return x.features * (2 if np.array(x.spatial_shape).max() > 40 else 1)


def chosen_by_numpy(x):
    return x.features * float(np.where(np.array(x.spatial_shape) > 40, 2, 1)[0])


def prod(x):
    return x.features * (2 if math.prod(x.spatial_shape) > 1000 else 1)


def text(x):
    return x.features * (2 if f"{x.spatial_shape[0]}" == "41" else 1)


def same(x):
    return x.features * (2 if x.spatial_shape == [41, 40, 7] else 1)


def one_of_several(x):
    return x.features * (2 if x.spatial_shape[0] in (41, 42) else 1)


def table(x):
    return x.features * {41: 2}.get(x.spatial_shape[0], 1)


def length(x):
    return x.features * (2 if len([0] * x.spatial_shape[0]) > 40 else 1)


def matched(x):
    match x.spatial_shape[0]:
        case 41:
            return x.features * 2
    return x.features


def caught(x):
    try:
        return x.features * {6: 1, 7: 1, 8: 1}[x.spatial_shape[0]]
    except KeyError:
        return x.features * 2


def largest(x):
    return x.features * max(x.spatial_shape[0], 40)


def rounded(x):
    return x.features * round(x.spatial_shape[0] / 100)


def number_tensor(x):
    return x.features * (torch.tensor(x.spatial_shape, device=x.features.device)[0] > 40).float().add(1)


def new_tensor(x):
    return x.features * x.features.new_tensor(x.spatial_shape).max().clamp(min=30)


def unpack(x):
    h, *_ = x.spatial_shape
    return x.features * (2 if h > 40 else 1)


def loop(x):
    y = x.features
    for h in x.spatial_shape:
        if h > 40:
            y = y * 2
    return y


def loop_while(x):
    y, h = x.features, x.spatial_shape[0]
    while h > 40:
        y, h = y * 2, h - 10
    return y


def any_of(x):
    return x.features * (2 if any(h > 40 for h in x.spatial_shape) else 1)


def yielded(x):
    def sizes():
        yield from x.spatial_shape

    return x.features * (2 if max(sizes()) > 40 else 1)


def zipped(x):
    return x.features * (2 if next(a > b for a, b in zip(x.spatial_shape, (40, 40, 40), strict=False)) else 1)


def rest(x):
    return x.features * (max(0, x.spatial_shape[0] - 40) + 1)


def and_or(x):
    return x.features * ((x.spatial_shape[0] > 40 and 2) or 1)


def as_integer(x):
    return x.features * (1 + int(x.spatial_shape[0] > 40))


def length_of_a_range(x):
    return x.features * (1 + len(range(40, x.spatial_shape[0])))


def strip(x):
    return x.features * (1 + ("1" in str(x.spatial_shape[0] // 1)))


def nested(x):
    info = {"grid": {"h": x.spatial_shape[0]}}
    return x.features * (2 if info["grid"]["h"] > 40 else 1)


def kept_in_a_list(x):
    found = []
    found.append(x.spatial_shape[0])
    return x.features * (2 if found[0] > 40 else 1)


def kept_in_a_dictionary(x):
    found = {}
    found["h"] = x.spatial_shape[0]
    return x.features * (2 if found["h"] > 40 else 1)


def updated_dictionary(x):
    found = {}
    found.update(h=x.spatial_shape[0])
    return x.features * (2 if found["h"] > 40 else 1)


def set_default(x):
    found = {}
    found.setdefault("h", x.spatial_shape[0])
    return x.features * (2 if found["h"] > 40 else 1)


class Box:
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return self.x.spatial_shape[0]

    def __getitem__(self, n):
        return self.x.spatial_shape[n]

    def __call__(self):
        return self.x.spatial_shape[0]

    def __gt__(self, other):
        return self.x.spatial_shape[0] > other

    def __bool__(self):
        return self.x.spatial_shape[0] > 40

    def __iter__(self):
        return iter(self.x.spatial_shape)

    def __float__(self):
        return float(max(40, self.x.spatial_shape[0]))

    def __enter__(self):
        return self.x.spatial_shape[0]

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        return self.x.spatial_shape[0]


def magic_len(x):
    return x.features * (2 if len(Box(x)) > 40 else 1)


def magic_item(x):
    return x.features * (2 if Box(x)[0] > 40 else 1)


def magic_call(x):
    return x.features * (2 if Box(x)() > 40 else 1)


def magic_gt(x):
    return x.features * (2 if Box(x) > 40 else 1)


def magic_bool(x):
    return x.features * (2 if Box(x) else 1)


def magic_iter(x):
    return x.features * (2 if next(iter(Box(x))) > 40 else 1)


def magic_float(x):
    return x.features * float(Box(x))


def magic_with(x):
    with Box(x) as h:
        return x.features * (2 if h > 40 else 1)


def magic_attr(x):
    return x.features * (2 if Box(x).height > 40 else 1)


@dataclasses.dataclass
class Extents:
    height: int
    items: int = 1


Pair = collections.namedtuple("Pair", ("cells", "limit"))


def data_class(x):
    return x.features * (2 if Extents(x.spatial_shape[0]).height > 40 else 1)


def named_tuple(x):
    return x.features * (2 if Pair(x.spatial_shape[0], 40).cells > 40 else 1)


def by_a_getter(x):
    return x.features * (2 if operator.attrgetter("spatial_shape")(x)[0] > 40 else 1)


def by_a_name(x):
    return x.features * (2 if getattr(x, "spatial_" + "shape")[0] > 40 else 1)


def by_its_dictionary(x):
    return x.features * (2 if x.__dict__["spatial_shape"][0] > 40 else 1)


def by_variables(x):
    shape, other = x.spatial_shape, x.batch_size
    again = shape
    return x.features * (2 if again[0] > 40 or other > 4 else 1)


def of_another(x):
    y = x.replace_feature(x.features)
    y.spatial_shape = x.spatial_shape
    return x.features * (2 if y.spatial_shape[0] > 40 else 1)


def items(x):
    return x.features * x.batch_size


PROGRAMS = [value for value in list(globals().values()) if getattr(value, "__module__", None) == __name__]
USES = {one.__name__: one for one in PROGRAMS if not isinstance(one, type) and one is not pick}


def handed_on(x):
    shape, items = x.spatial_shape, x.batch_size
    y = type(x)(x.features, x.indices, x.spatial_shape, x.batch_size)
    z = x.__class__(y.features, indices=y.indices, spatial_shape=shape, batch_size=items)
    y.spatial_shape = x.spatial_shape
    return z.features * len(x.spatial_shape)


class Named:
    """It has methods that are called as functions that read attributes are."""

    def getattr(self):
        return 2

    hasattr = attrgetter = getattr


def not_looked_at(x):
    named = Named()
    return x.features * named.getattr() * named.hasattr() * named.attrgetter()


class OfItsOwn(Reads):
    """It has a grid that no scene changes."""

    spatial_shape = (6, 6, 7)

    def forward(self, x):
        limits = [size for size in self.spatial_shape if size > 6]
        return super().forward(x).features * len(limits)


@pytest.mark.parametrize("name", USES)
def test_a_use_of_the_grid(name):
    with spconv_apis.standin() as sp, torch.no_grad():
        uses = audited(Reads(sp, USES[name]), sp).guards().grid_uses
        assert uses and uses <= GRID
        assert name != "items" or uses == {"batch_size"}


@pytest.mark.parametrize("read", [handed_on, not_looked_at])
def test_a_grid_that_is_handed_on(read):
    """Graphs serve all grids."""
    with spconv_apis.standin() as sp, torch.no_grad():
        assert audited(Reads(sp, read), sp).guards().grid_uses == frozenset()


def test_the_grid_of_a_module():
    with spconv_apis.standin() as sp, torch.no_grad():
        assert audited(OfItsOwn(sp, not_looked_at), sp).guards().grid_uses == frozenset()


def test_classes_of_a_framework_are_known_by_name(monkeypatch):
    """Others may compute with what they are given."""
    with spconv_apis.standin() as sp, torch.no_grad():
        for maker, used in ((sp.SparseConvTensor, False), (Maker, True)):
            monkeypatch.setattr(sys.modules[__name__], "make", maker, raising=False)
            uses = audited(Reads(sp, made), sp).guards().grid_uses
            assert bool(uses) == used


class Maker:
    def __init__(self, values, coords, shape, items):
        self.features = values * (2 if shape[0] > 40 else 1)


def made(x):
    return make(x.features, x.indices, x.spatial_shape, x.batch_size).features  # noqa: F821
