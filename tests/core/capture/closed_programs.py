"""Programs whose Python is read, written or called by a model: which a replay must not change.

Each is the end of a network's forward. `closed` lists those with a closed world, with what may change after the call;
`opened` those with an open one.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import datetime
import enum
import functools
import heapq
import inspect
import itertools
import logging
import math
import operator
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref
from time import sleep

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.backends.mps import is_available

from tests.core.capture import closed_settings
from tests.core.capture.closed_settings import FACTOR

CASES: dict[str, tuple] = {}  # name: (class, changes; None where the world is open)
WRITERS: dict[str, type] = {}  # that write unseen what they read as well: each call is a change


def times(x, value):
    return x.replace_feature(x.features * value)


def then(_, x):
    return x


class Net(nn.Module):
    def __init__(self, sp):
        super().__init__()

        def block(n_in, n_out, key):
            conv = sp.SubMConv3d(n_in, n_out, 3, bias=False, indice_key=key)
            return sp.SparseSequential(conv, nn.BatchNorm1d(n_out), nn.ReLU())

        self.a, self.b = block(4, 8, "a"), block(8, 8, "a")
        self.scale, self.calls, self.kept, self.sizes = 1.0, 0, {}, []
        for name, value in self.more().items():
            setattr(self, name, value)

    def more(self):
        """Attributes that a program has besides."""
        return {}

    def forward(self, x):
        return self.end(self.b(self.a(x)))

    def end(self, x):
        return x


def _enter(name, program, changes, makers):
    """program: a class, or the function that is its `end`.  makers: of its attributes."""
    if not isinstance(program, type):
        more = lambda self: {attribute: make() for attribute, make in makers.items()}  # noqa: E731
        program = type(name, (Net,), {"end": program, "more": more})
    CASES[name] = program, changes
    return program


def closed(name, program, *changes, **makers):
    """A program with a closed world. changes: functions of the model, each of which a guard has to notice."""
    return _enter(name, program, changes, makers)


def opened(name, program=None, **makers):
    """A program with an open world; without one, a decorator of it."""
    return (lambda one: _enter(name, one, None, makers)) if program is None else _enter(name, program, None, makers)


def writer(name, program, **makers):
    """A program that changes in each call what its guards hold."""
    WRITERS[name] = _enter(name, program, None, makers)
    del CASES[name]


def case(name, *changes):
    """A decorator of a program with a closed world."""
    return lambda program: _enter(name, program, changes, {})


# the model's attributes


def sets(path, value):
    """The change of an attribute of the model."""
    owner, _, name = path.rpartition(".")
    return lambda m: setattr(functools.reduce(getattr, owner.split(".") if owner else (), m), name, value)


def puts(owner, name, value):
    """The change of an attribute of something else."""
    return lambda m: setattr(owner, name, value)


scale, sets_global = functools.partial(sets, "scale"), lambda name, value: lambda m: globals().update({name: value})


class Doubled(Net):
    def end(self, x):
        return times(x, 2.0)


closed(
    "plain",
    Net,
    sets("a.1.momentum", 0.5),
    sets("a.1.eps", 1e-2),
    sets("b.1.training", False),
    sets("a.2.inplace", True),
    sets("end", lambda x: x),
    lambda m: m.a[1].register_forward_hook(lambda module, inputs, output: output + 1),
    sets("b.2", nn.LeakyReLU(0.1)),
    sets("a.2.forward", lambda x: x),
    sets("__class__", Doubled),
)
closed("attribute", lambda self, x: times(x, self.scale), scale(0.5), scale(1), scale(True))
opened("caches in a dictionary", lambda self, x: times(x, self.kept.setdefault(x.features.shape[0] % 7, 1)))
opened("appends through a helper", lambda self, x: then(note(self.sizes, x.features.shape[1]), x))
opened("writes through a helper", lambda self, x: then(enter(self.kept, x.features.shape[1]), x))


@case("writes in a branch that is not taken", sets("sizes", [1]))
def _(self, x):
    if x.features.shape[1] > 1000:
        self.sizes.append(1)
    return x


def note(log, value):
    log.append(value)


note.factor = 1.0


def enter(table, value):
    table["width"] = value


class AllRates:
    rate = 1.0


class Rates(AllRates):
    pass


class Table:
    def __init__(self, values):
        self.values = values

    def __getattr__(self, name):
        if name.startswith("__") or name == "values":
            raise AttributeError(name)
        return self.values[name]


class Config(dict):
    """A dictionary whose entries are attributes as well."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


@dataclasses.dataclass
class Settings:
    width: float = 1.0
    names: list = dataclasses.field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("width",)

    def __init__(self):
        self.width = 1.0


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return times(x, self.factor)


class Meter:
    def __init__(self):
        self.total = 0

    def add(self, value):
        self.total += value


class Wrapped:
    def __init__(self, x):
        self.x = x

    def scaled(self, value):
        self.x = times(self.x, value)
        return self


Pair = collections.namedtuple("Pair", "width height")
Mode = enum.Enum("Mode", "PLAIN DOUBLE")

closed(
    "list in a dictionary",
    lambda self, x: times(x, self.config["w"][1]),
    lambda m: m.config["w"].__setitem__(1, 7.0),
    lambda m: m.config["w"].append(1.0),
    lambda m: m.config.clear(),
    config=lambda: {"w": [1.0, 2.0]},
)
closed(
    "array of numpy",
    lambda self, x: times(x, float(self.size[0])),
    lambda m: m.size.fill(3),
    size=lambda: np.array([2, 2, 2]),
)
closed(
    "set of names",
    lambda self, x: times(x, 2.0) if "b" in self.names else x,
    lambda m: m.names.discard("b"),
    names=lambda: {"a", "b"},
)
closed(
    "attribute of a base class",
    lambda self, x: times(x, self.rates.rate),
    puts(Rates, "rate", 3.0),
    sets("rates.rate", 3.0),
    rates=Rates,
)
closed("attribute found by name", lambda self, x: times(x, getattr(self, "sca" + "le")), scale(0.5))
closed("attribute that may be missing", lambda self, x: times(x, getattr(self, "extra", 1.0)), sets("extra", 2.0))
closed(
    "__getattr__",
    lambda self, x: times(x, self.table.scale),
    lambda m: m.table.values.update(scale=3.0),
    table=lambda: Table({"scale": 1.0}),
)
closed(
    "dictionary with attributes",
    lambda self, x: times(x, self.config.w),
    sets("config.w", 2.0),
    config=lambda: Config(w=1.0),
)
closed(
    "dataclass",
    lambda self, x: times(x, self.settings.width * len(self.settings.names)),
    sets("settings.width", 2.0),
    lambda m: m.settings.names.append(1),
    settings=Settings,
)
closed("slots", lambda self, x: times(x, self.slotted.width), sets("slotted.width", 2.0), slotted=Slotted)
closed(
    "named tuple", lambda self, x: times(x, self.pair.width), sets("pair", Pair(2.0, 1.0)), pair=lambda: Pair(1.0, 1.0)
)
closed(
    "enum",
    lambda self, x: times(x, 2.0) if self.mode is Mode.DOUBLE else x,
    sets("mode", Mode.DOUBLE),
    mode=lambda: Mode.PLAIN,
)
closed(
    "partial",
    lambda self, x: self.act(x),
    sets("act", functools.partial(times, value=3.0)),
    act=lambda: functools.partial(times, value=2.0),
)
closed("object that is called", lambda self, x: self.scaler(x), sets("scaler.factor", 2.0), scaler=lambda: Scaler(1.0))
closed("bound method", lambda self, x: self.act(x), sets("act.__self__.factor", 2.0), act=lambda: Scaler(1.0).__call__)
closed("dictionary of the call", lambda self, x: times(x, {"w": self.scale}["w"]), scale(0.5))
opened("object that counts", lambda self, x: then(self.meter.add(1), x), meter=Meter)
closed("object made in the call", lambda self, x: Wrapped(x).scaled(self.scale).x, scale(0.5))
closed(
    "branch by class",
    lambda self, x: times(x, 2.0) if isinstance(self.head, nn.Identity) else x,
    sets("head", nn.ReLU()),
    head=nn.Identity,
)
opened(
    "list of modules with weights",
    lambda self, x: x.replace_feature(self.parts[0](x.features)),
    parts=lambda: [nn.Linear(8, 8)],
)
opened("dictionary of tensors", lambda self, x: times(x, self.tensors["w"]), tensors=lambda: {"w": WEIGHT})
closed(
    "cached attribute that is there",
    lambda self, x: times(x, self.width if hasattr(self, "width") else 1.0),
    sets("width", 3.0),
    width=lambda: 2.0,
)


@case("class attribute", lambda m: setattr(Hidden, "factor", 3.0), sets("factor", 3.0))
class Hidden(Net):
    factor = 1.0

    def end(self, x):
        return times(x, self.factor)


@case("method replaced", lambda m: setattr(Patched, "end", lambda self, x: times(x, 3.0)))
class Patched(Doubled):
    def end(self, x):
        return times(x, 2.0)


@case("property", scale(0.5))
class Property(Net):
    @property
    def factor(self):
        return self.scale * 2

    def end(self, x):
        return times(x, self.factor)


@case("branch by flag", sets("early", True))
class ByFlag(Net):
    def more(self):
        return {"early": False}

    def forward(self, x):
        x = self.a(x)
        if self.early:
            return x
        return self.end(self.b(x))


@case("list of modules", lambda m: m.parts.pop())
class Parts(Net):
    def more(self):
        return {"parts": [nn.ReLU(), nn.Identity()]}

    def end(self, x):
        for part in self.parts:
            x = x.replace_feature(part(x.features))
        return x


@case("layers in a loop", scale(2.0))
class Loops(Net):
    def more(self):
        return {"acts": nn.ModuleList([nn.ReLU() for _ in range(3)])}

    def end(self, x):
        outputs = []
        for i in range(len(self.acts)):
            outputs.append(self.acts[i](x.features))
        for i, act in enumerate(self.acts):
            outputs[i] = act(outputs[i]) * self.scale
        merged = {f"level{i}": value for i, value in enumerate(outputs)}
        merged["sum"] = torch.stack(list(merged.values())).sum(0)
        return x.replace_feature(merged["sum"])


def through(self, x):
    for part in self.parts:
        x = x.replace_feature(part(x.features))
    return x


for _kind in (nn.ModuleList, nn.Sequential):
    closed(f"an empty {_kind.__name__}", through, lambda m: m.parts.append(nn.ReLU()), parts=_kind)
closed(
    "an empty ModuleDict",
    lambda self, x: times(x, float(len(self.parts))),
    lambda m: m.parts.update({"act": nn.ReLU()}),
    parts=nn.ModuleDict,
)


# what reads attributes whose names are not in sight


@dataclasses.dataclass
class Stage:
    kind: str = "a"
    width: float = 1.0


class Data(collections.UserDict):
    pass


class Meta(type):
    rate = 1.0


class Metered(metaclass=Meta):
    pass


class Task(enum.Enum):
    SEGMENT = {"width": 1.0}  # noqa: RUF012


class Hides:
    __slots__ = ("__slot", "__width")
    __rate = 1.0

    def __init__(self):
        self.__width = self.__slot = 1.0

    def product(self):
        return self.__width * self.__rate


class Calls:
    def __call__(self, x):
        return x

    def __mul__(self, value):
        return value


class CallsToo(Calls):
    pass


class Activation(nn.Module):
    def forward(self, x):
        return x


class ActivationToo(Activation):
    pass


def by_match(self, x):
    match self.stage:
        case Stage(width=1.0):
            return times(x, 2.0)
    return x


def by_match_of_places(self, x):
    match self.stage:
        case Stage("a", 1.0):
            return times(x, 2.0)
    return x


def named_children(self, x):
    for name, _ in self.parts.named_children():
        x = times(x, 2.0) if name.startswith("act") else x
    return x


def renamed(m):
    m.parts["other"] = m.parts.pop("act")


wider = sets("stage.width", 2.0)
for _name, _end in {
    "attrgetter": lambda self, x: times(x, operator.attrgetter("stage.width")(self)),
    "getattr that is handed on": lambda self, x: times(x, sum(map(getattr, [self.stage], ["wid" + "th"]))),
    "__getattribute__": lambda self, x: times(x, self.stage.__getattribute__("wid" + "th")),
    "format of attributes": lambda self, x: times(x, float("{0.width}".format(self.stage))),  # noqa: UP030, UP032
    "dataclasses that are compared": lambda self, x: times(x, 2.0) if self.stage == Stage() else x,
    "dataclass in a text": lambda self, x: times(x, float(len(repr(self.stage)))),
    "dataclass as a dictionary": lambda self, x: times(x, dataclasses.asdict(self.stage)["wid" + "th"]),
    "match by attributes": by_match,
    "match by places": by_match_of_places,
}.items():
    closed(_name, _end, wider, stage=Stage)
closed(
    "name that may come",
    lambda self, x: times(x, 2.0) if hasattr(self.stage, "ex" + "tra") else x,
    sets("stage.extra", 1),
    stage=Stage,
)
closed(
    "class attribute by a computed name",
    lambda self, x: times(x, getattr(closed_settings.Options, "wid" + "th")),
    puts(closed_settings.Options, "width", 3.0),
)
closed(
    "slot by a computed name",
    lambda self, x: times(x, getattr(self.slotted, "wid" + "th")),
    sets("slotted.width", 2.0),
    slotted=Slotted,
)
closed(
    "UserDict", lambda self, x: times(x, self.given["w"]), lambda m: m.given.update(w=2.0), given=lambda: Data(w=1.0)
)
closed(
    "object of numpy",
    lambda self, x: times(x, float(self.line(2.0))),
    lambda m: m.line.__setitem__(0, 3.0),
    line=lambda: np.poly1d([1.0, 2.0]),
)
closed("attribute of a metaclass", lambda self, x: times(x, Metered.rate), puts(Meta, "rate", 2.0))
closed(
    "value of an enum",
    lambda self, x: times(x, Task.SEGMENT.value["width"]),
    lambda m: Task.SEGMENT.value.update(width=Task.SEGMENT.value["width"] + 1),
)
closed(
    "private names",
    lambda self, x: times(x, self.hides.product()),
    sets("hides._Hides__width", 2.0),
    lambda m: setattr(Hides, "_Hides__rate", 2.0),
    hides=Hides,
)
closed("names of modules", named_children, renamed, parts=lambda: nn.ModuleDict({"act": nn.ReLU()}))
closed(
    "operators that a base class has",
    lambda self, x: self.act(times(x, self.act * 2.0)),
    puts(CallsToo, "__call__", lambda self, x: times(x, 3.0)),
    puts(CallsToo, "__mul__", lambda self, value: 3.0),
    puts(Calls, "__getattr__", lambda self, name: 3.0),
    lambda m: setattr(CallsToo, "__bases__", (type("Other", (Calls,), {}),)),
    act=CallsToo,
)


@case("attribute of a parameter", lambda m: setattr(m.linear.weight, "rate", 3.0))
class Marked(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.linear = nn.Linear(8, 8)
        self.linear.weight.rate = 1.0

    def end(self, x):
        return times(x, self.linear.weight.rate)


closed(
    "forward that a base class has",
    lambda self, x: self.act(x),
    puts(ActivationToo, "forward", lambda self, x: times(x, 3.0)),
    act=ActivationToo,
)

# globals, closures, defaults

ALPHA, SEEN, TABLE, COUNT, MODE = 1.0, [], {"w": [1.0]}, 0, "plain"
LIMITS = types.SimpleNamespace(high=2.0)
LOG = logging.getLogger("closed_programs")
TICKS, NUMBERS = itertools.count(), iter(range(10**9))
CONTEXT = contextvars.ContextVar("context", default=1.0)
LOCAL = threading.local()
LOCAL.factor = 1.0
LOCK = threading.Lock()
GENERATOR = torch.Generator()
WEIGHT = torch.ones(8)
NUMBER_OF, GROWING = collections.Counter(), collections.defaultdict(list)


def _of(settings):
    held = settings["of"]
    return held


def helper(x):
    return times(x, 2.0)


def scale_of(settings):
    return settings.SCALE


def widened(x, factor=1.0):
    return times(x, factor)


def narrowed(x, *, factor=1.0):
    return times(x, factor)


@functools.singledispatch
def rate_of(x):
    return 1.0


def bump(meter):
    meter.total += 1


def bump_named(**objects):
    objects["meter"].total += 1


def bump_all(*objects):
    objects[0].total += 1


class Only:
    """An object that is made once."""

    _it = None

    def __new__(cls):
        if cls._it is None:
            cls._it = super().__new__(cls)
            cls._it.total = 0
        return cls._it


Only()


def other_relu(m):
    F.hardtanh = F.relu6


closed("global", lambda self, x: times(x, ALPHA), sets_global("ALPHA", 0.25))


@case("default of an inner function", scale(0.5))
def _(self, x):
    def inner(factor=self.scale, *, more=1.0):
        return factor * more

    return times(x, inner())


@case("keyword's default of an inner function", sets_global("ALPHA", 0.25))
def _(self, x):
    def inner(*, factor=ALPHA):
        return factor

    return times(x, inner())


@case("default of a lambda", scale(0.5))
def _(self, x):
    return times(x, (lambda factor=self.scale: factor)())


def multiplied(factor):
    return lambda function: lambda x: times(function(x), factor)


@case("decorator of an inner function", scale(0.5))
def _(self, x):
    @multiplied(self.scale)
    def inner(x):
        return x

    return inner(x)


closed(
    "attribute that a layer may get", lambda self, x: times(x, getattr(self.a[0], "lora", 1.0)), sets("a.0.lora", 3.0)
)
closed("global list", lambda self, x: times(x, 1.0 + len(SEEN)), lambda m: SEEN.append(1))
closed("global dictionary", lambda self, x: times(x, TABLE["w"][0]), lambda m: TABLE["w"].insert(0, 4.0))
closed("global object", lambda self, x: times(x, LIMITS.high), puts(LIMITS, "high", 3.0))
closed("global of another module", lambda self, x: times(x, closed_settings.SCALE), puts(closed_settings, "SCALE", 3.0))
closed(
    "function of another module",
    lambda self, x: times(x, closed_settings.factor("x")),
    puts(closed_settings, "FACTORS", {"x": 3.0}),
)
closed(
    "class of settings",
    lambda self, x: times(x, closed_settings.Options.width),
    puts(closed_settings.Options, "width", 3.0),
)
closed(
    "module that is kept",
    lambda self, x: times(x, self.settings.SCALE),
    sets("settings", types.SimpleNamespace(SCALE=1.0)),
    puts(closed_settings, "SCALE", 3.0),
    settings=lambda: closed_settings,
)
closed(
    "function of a module that is kept in a list",
    lambda self, x: times(x, self.settings[0].factor("x")),
    puts(closed_settings, "FACTORS", {"x": 3.0}),
    settings=lambda: [closed_settings],
)
closed(
    "module that a variable holds",
    lambda self, x: times(x, _of(self.settings).SCALE),
    puts(closed_settings, "SCALE", 3.0),
    settings=lambda: {"of": closed_settings},
)
closed(
    "module by the name of an attribute",
    lambda self, x: times(x, getattr(closed_settings, "SCALE")),  # noqa: B009
    puts(closed_settings, "SCALE", 3.0),
)
closed(
    "module that has no such attribute",
    lambda self, x: times(x, 2.0) if hasattr(closed_settings, "EXTRA") else x,
    puts(closed_settings, "EXTRA", 3.0),
)
closed(
    "module that is handed on", lambda self, x: times(x, scale_of(closed_settings)), puts(closed_settings, "SCALE", 3.0)
)
closed(
    "switch of torch that is read",
    lambda self, x: times(x, 2.0) if torch.backends.cudnn.benchmark else x,
    lambda m: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
)
closed(
    "code and defaults of a function",
    lambda self, x: widened(x),
    lambda m: setattr(widened, "__code__", (lambda x, factor: times(x, 3.0)).__code__),
    lambda m: setattr(widened, "__defaults__", (3.0,)),
)
closed(
    "default of an argument by name alone",
    lambda self, x: narrowed(x),
    lambda m: narrowed.__kwdefaults__.update(factor=3.0),
)
closed(
    "tag that a parameter may have",
    lambda self, x: times(x, getattr(self.b[0].weight, "tag", 1.0)),
    lambda m: setattr(m.b[0].weight, "tag", 3.0),
)
closed(
    "whether a parameter has a tag",
    lambda self, x: times(x, 2.0 if hasattr(self.b[0].weight, "tag") else 1.0),
    lambda m: setattr(m.b[0].weight, "tag", None),
)
closed(
    "tag under any name that a parameter may have",
    lambda self, x: times(x, vars(self.b[0].weight).get("tag", 1.0)),
    lambda m: setattr(m.b[0].weight, "tag", 3.0),
)
closed(
    "whether a parameter is trained",
    lambda self, x: times(x, 1.0 if self.b[0].weight.requires_grad else 2.0),
    lambda m: m.b[0].weight.requires_grad_(False),
)
closed(
    "whether a parameter has a gradient",
    lambda self, x: times(x, 1.0 if self.b[0].weight.grad is None else 2.0),
    lambda m: setattr(m.b[0].weight, "grad", torch.zeros_like(m.b[0].weight)),
)
closed(
    "how often a parameter was written to",
    lambda self, x: times(x, float(self.b[0].weight._version)),
    lambda m: m.b[0].weight.detach().mul_(1.0),
)
closed(
    "function by class", lambda self, x: times(x, rate_of(x)), lambda m: rate_of.register(type("Other", (), {}), abs)
)
for _name, _end in {
    "object among named arguments": lambda self, x: then(bump_named(meter=self.meter), x),
    "object among all arguments": lambda self, x: then(bump_all(self.meter), x),
    "object for a function of another name": lambda self, x: then(self.callback(self.meter), x),
    "objects of map": lambda self, x: then(list(map(bump, [self.meter])), x),
    "object of partial": lambda self, x: then(functools.partial(bump, self.meter)(), x),
}.items():
    writer(_name, _end, meter=Meter, callback=lambda: bump)


@functools.partial(writer, "object that a class keeps")
def _(self, x):
    Only().total += 1
    return x


opened("append that map calls", lambda self, x: then(list(map(self.sizes.append, [1])), x))
opened("function of the system that map calls", lambda self, x: then(list(map(time.sleep, [0])), x))
opened("imported function that map calls", lambda self, x: then(list(map(sleep, [0])), x))
opened(
    "function of the system in a partial",
    lambda self, x: then(self.say(), x),
    say=lambda: functools.partial(time.sleep, 0),
)
opened("builtin that map calls", lambda self, x: times(x, 1.0 + sum(map(id, [x])) % 2))
opened("file of numpy", lambda self, x: times(x, float(np.fromfile(__file__, np.uint8, 1)[0])))
opened("file that numpy writes", lambda self, x: then(np.savetxt(os.devnull, np.zeros(1)), x))
opened(
    "module that torch.jit has compiled",
    lambda self, x: x.replace_feature(self.compiled(x.features)),
    compiled=lambda: torch.jit.script(nn.ReLU()),
)
opened("threads of torch", lambda self, x: times(x, float(torch.get_num_threads())))
opened("gradients that are cleared", lambda self, x: then(self.zero_grad(), x))
opened(
    "schedule of learning rates",
    lambda self, x: then(self.schedule.step(), x),
    schedule=lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1),
)
closed("function replaced", lambda self, x: helper(x), sets_global("helper", lambda x: times(x, 3.0)))
closed("function of torch replaced", lambda self, x: x.replace_feature(F.hardtanh(x.features)), other_relu)
opened("appends to a global", lambda self, x: then(SEEN.append(x.features.shape[1]), x))
opened("counter of collections", lambda self, x: then(NUMBER_OF.update(["call"]), x))
opened("dictionary that grows when it is read", lambda self, x: times(x, 1.0 + len(GROWING[x.features.shape[1]])))
opened("heap", lambda self, x: then(heapq.heappush(SEEN, 1), x))
opened("entry set by its method", lambda self, x: then(dict.__setitem__(TABLE, "calls", 1), x))
opened("list changed by its class", lambda self, x: then(list.append(SEEN, 1), x))
closed("attribute of a function that is read", lambda self, x: times(x, note.factor), puts(note, "factor", 2.0))
opened("date", lambda self, x: times(x, float(datetime.datetime.now().year > 0)))
opened("dictionary of the object", lambda self, x: then(self.__dict__.update(last=object()), x))
opened("path by the stack", lambda self, x: times(x, 1.0 + 0 * len(inspect.stack())))
opened("counter in another module", lambda self, x: then(closed_settings.count(), x))
opened("counter of a module that is kept", lambda self, x: then(self.it.count(), x), it=lambda: closed_settings)
opened("random numbers of a module that is kept", lambda self, x: times(x, self.it.random()), it=lambda: random)
opened("environment of a module that is kept", lambda self, x: times(x, len(self.it.environ)), it=lambda: os)
opened("attribute of its class by name", lambda self, x: then(setattr(Doubled, "last", 3), x))


@case("imported inside", puts(closed_settings, "SCALE", 5.0))
def _(self, x):
    from tests.core.capture import closed_settings as settings

    return times(x, settings.SCALE * FACTOR)


@case("writes the same again", sets_global("MODE", "other"), sets("calls", 1))
def _(self, x):
    global MODE
    MODE, self.calls = "plain", 0
    return x


@case("norm that stays in evaluation", sets("a.1.training", True))
class StaysEval(Net):
    def train(self, mode=True):
        super().train(mode)
        self.a[1].eval()
        return self

    def forward(self, x):
        self.a[1].eval()
        return super().forward(x)


@opened("class that counts")
class ClassCounts(Net):
    total = 0

    @classmethod
    def count(cls):
        cls.total += 1

    def end(self, x):
        self.count()
        return x


@opened("replaces a buffer")
class ReplacesBuffer(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("mean", torch.zeros(8))

    def end(self, x):
        self.mean = self.mean * 0.9 + x.features.mean(0) * 0.1
        return x


CELL, DECORATED = [3.0], {"factor": 1.0}


def closing(cell):
    return lambda self, x: times(x, cell[0])


def counting():
    calls = 0

    def end(self, x):
        nonlocal calls
        calls += 1
        return x

    return end


def remembering(function):
    results = {}

    @functools.wraps(function)
    def wrapper(self, x):
        results["last"] = x.features.shape[1]
        return function(self, x)

    return wrapper


def scaled_by(settings):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, x):
            return times(function(self, x), settings["factor"])

        return wrapper

    return decorate


def scaled(x, factors=[1.0]):  # noqa: B006
    return times(x, factors[0])


@functools.lru_cache
def cached(width):
    return width * 2


def numbers():
    n = 0
    while True:
        n += 1
        yield n


closed("closure", closing(CELL), lambda m: CELL.__setitem__(0, 5.0))
opened("counter in a closure", counting())
closed("decorator", scaled_by(DECORATED)(lambda self, x: x), lambda m: DECORATED.update(factor=2.0))
opened("decorator that remembers", remembering(lambda self, x: x))
opened("default that is a list", lambda self, x, seen=[]: then(seen.append(1), x))
closed("default that is read", lambda self, x: scaled(x), lambda m: scaled.__defaults__[0].append(2.0))
opened("lru_cache", lambda self, x: times(x, cached(x.features.shape[1])))
closed(
    "lru_cache of torch",
    lambda self, x: times(x, 2.0) if is_available() else x,
    sets_global("is_available", lambda: True),
)
disguised = functools.update_wrapper(functools.lru_cache(lambda: len(SEEN)), is_available)
opened("lru_cache that says it is torch's", lambda self, x: times(x, disguised()))
closed(
    "device of its parameters",
    lambda self, x: x.replace_feature(x.features.to(next(self.a.parameters()).device, next(self.parameters()).dtype)),
)
opened("itertools.count", lambda self, x: times(x, 1.0 + next(TICKS)))
opened("generator", lambda self, x: times(x, next(self.numbers)), numbers=numbers)
opened("context variable", lambda self, x: times(x, CONTEXT.get()))
opened("thread local", lambda self, x: times(x, LOCAL.factor))
opened("global tensor", lambda self, x: times(x, WEIGHT))


@opened("cached property")
class CachedProperty(Net):
    @functools.cached_property
    def factor(self):
        return 2.0

    def end(self, x):
        return times(x, self.factor)


@opened("generator in a loop", numbers=numbers)
def _(self, x):
    for number in self.numbers:
        return times(x, number)


@case("generator of the call", scale(0.5))
class OwnGenerator(Net):
    def parts(self, x):
        yield x.features * self.scale
        yield x.features

    def end(self, x):
        return x.replace_feature(sum(part for part in self.parts(x)))


@opened("weak reference")
class Weak(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.settings = Settings()
        self.reference = weakref.ref(self.settings)

    def end(self, x):
        return times(x, self.reference().width)


# what it calls


class Bar:
    """A bar of progress."""

    def __init__(self):
        self.n = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self):
        self.n += 1


opened("prints", lambda self, x: then(print("rows", x.features.shape[1]), x))
opened("prints elsewhere", lambda self, x: then(closed_settings.say("a call"), x))
opened("writes to stderr", lambda self, x: then(sys.stderr.write(""), x))
opened("logs", lambda self, x: then(LOG.warning("a call"), x))
opened("logs nothing yet", lambda self, x: then(LOG.debug("a call"), x))
opened("warns", lambda self, x: then(warnings.warn("a call", stacklevel=1), x))
opened("environment", lambda self, x: times(x, float(os.environ.get("CLOSED_FACTOR", "1"))))
opened("getenv", lambda self, x: times(x, float(os.getenv("CLOSED_FACTOR", "1"))))
opened("clock", lambda self, x: times(x, 1.0 + 0 * time.perf_counter()))
opened("random numbers of Python", lambda self, x: times(x, random.random()))
opened("random integers of Python", lambda self, x: times(x, random.randint(1, 2)))
opened("random numbers of numpy", lambda self, x: times(x, float(np.random.rand())))
opened(
    "generator of numpy", lambda self, x: times(x, float(self.random.random())), random=lambda: np.random.default_rng(1)
)
closed(
    "random numbers of torch",
    lambda self, x: x.replace_feature(x.features + torch.rand_like(x.features) + torch.rand(x.features.shape)),
)
opened("generator of torch", lambda self, x: x.replace_feature(x.features + torch.rand(8, generator=GENERATOR)))
opened("identity", lambda self, x: times(x, 1.0 + id(x) % 2))
opened("exec", lambda self, x: then(exec("ALPHA"), x))
opened("globals()", lambda self, x: times(x, globals()["ALPHA"]))


@opened("bar of progress", bar=Bar)
def _(self, x):
    with self.bar as bar:
        bar.update()
    return x


@opened("callback", callbacks=lambda: [SEEN.append])
def _(self, x):
    for callback in self.callbacks:
        callback(x.features.shape[1])
    return x


# what it chooses by


def is_large(n):
    return n > 10


def weight_of(n):
    if n > 10:
        return 1.0
    return 2.0


opened("branch on data", lambda self, x: times(x, 2.0) if x.features.max().item() > 1.5 else x)
opened("branch on a tensor", lambda self, x: times(x, 2.0) if x.features.max() > 1.5 else x)
opened("number of a tensor", lambda self, x: times(x, float(x.features.max())))
opened("tensor in a text", lambda self, x: times(x, float(len(f"{x.features.max():.1f}"))))
opened("branch on rows", lambda self, x: times(x, 2.0) if x.features.shape[0] > 10 else x)
opened("branch on the length of a tensor", lambda self, x: times(x, 2.0) if len(x.features) > 10 else x)
opened("branch on rows by way of a function", lambda self, x: times(x, 2.0) if is_large(x.features.size(0)) else x)
opened("branch in a function on rows", lambda self, x: times(x, weight_of(x.indices.shape[0])))
opened("comparison of rows as a number", lambda self, x: times(x, 1.0 + (x.features.shape[0] > 10)))
opened("rows up to a limit of numpy", lambda self, x: times(x, float(np.clip(x.features.shape[0], 1, 10))))
opened("rows up to a limit", lambda self, x: times(x, float(min(x.features.shape[0], 10))))
opened("rows up to a limit in a list", lambda self, x: times(x, float(min([10, len(x.features), x.indices.shape[0]]))))
opened("dozens of rows", lambda self, x: times(x, 1.0 + x.features.shape[0] // 12))
opened("octave of rows", lambda self, x: times(x, float(math.floor(math.log2(x.features.shape[0])))))
opened("whole part of rows", lambda self, x: times(x, float(int(x.features.shape[0] / 100))))
opened("branch on a logarithm", lambda self, x: times(x, 2.0) if math.log2(x.features.shape[0]) > 3 else x)
opened("number of rows in a table", lambda self, x: times(x, {16: 2.0}.get(x.features.shape[0], 1.0)))
opened("table by rows", lambda self, x: times(x, [1.0, 2.0, 3.0][x.features.shape[0] % 3]))


@case("branch on channels", scale(0.5))
def _(self, x):
    n, c = x.features.shape
    if c == 8 and x.features.shape[1] == 8 and x.features.shape[-1] == 8 and x.features.dim() == 2:
        x = times(x, self.scale)
    return x.replace_feature(x.features.view(n, c) + torch.zeros(n, c))


@case("fewest rows, and most", scale(0.5))
def _(self, x):
    n = min(x.features.shape[0], len(x.indices)) - max(x.features.shape[0], 1)
    return times(x, self.scale + n + min(2, self.scale))


@case("assertions on shapes")
def _(self, x):
    assert x.features.shape[0] == x.indices.shape[0], f"{x.features.shape}"
    if x.features.shape[0] == 0:
        raise ValueError("no rows")
    return x


# grammar


@contextlib.contextmanager
def doubling():
    yield 2.0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 2 * x * gradient


class LoudSquare(Square):
    @staticmethod
    def backward(context, gradient):
        print("backward")
        return gradient


closed("function of autograd", lambda self, x: x.replace_feature(Square.apply(x.features)))
opened("backward that prints", lambda self, x: x.replace_feature(LoudSquare.apply(x.features)))
closed("attributes that it does not read", lambda self, x: x, logger=lambda: LOG, lock=lambda: LOCK, epoch=int)


@case("with-statement")
def _(self, x):
    with torch.no_grad(), contextlib.nullcontext(), torch.autocast("cpu", enabled=False):
        return times(x, math.sqrt(2.0) * operator.mul(2.0, 1.0))


@case("context of its own")
def _(self, x):
    with doubling() as factor:
        return times(x, factor)


@case("try and except", sets("kept", {"w": 2.0}))
def _(self, x):
    try:
        return times(x, self.kept["w"])
    except KeyError:
        return x


@case("texts and lists", scale(0.5))
def _(self, x):
    names = [f"{name}:{self.scale:.1f}" for name in ("a", "b")]
    table = {name: float(name.partition(":")[2]) for name in names}
    table.update(c=1.0)
    total, (first, *rest) = 0.0, sorted(table.values())
    for value in [first, *rest]:
        total += value
    return times(x, total if (n := len(names)) == 2 else n)


@case("lambda", scale(0.5))
def _(self, x):
    double = lambda y: y * self.scale  # noqa: E731
    return x.replace_feature(double(x.features))


@case("base class", scale(3.0))
class Inherits(CASES["attribute"][0]):
    def end(self, x):
        return super().end(times(x, 2.0))


class Statements:
    """Programs with an open world that no expression is: their names in words."""

    def counts_its_calls(self, x):
        self.calls += 1
        return times(x, self.calls)

    def writes_an_entry_of_a_dictionary(self, x):
        self.kept["last"] = x.features.shape[1]
        return x

    def keeps_an_average_of_weights(self, x):
        for name, parameter in self.named_parameters():
            self.kept[name] = parameter.detach().clone()
        return x

    def cached_attribute_that_is_not_there_yet(self, x):
        if not hasattr(self, "width"):
            self.width = 2.0
        return times(x, self.width)

    def appends_to_a_global_in_a_branch_that_is_not_taken(self, x):
        if self.calls:
            SEEN.append(1)
        return x

    def keeps_how_many_rows_there_are(self, x):
        self.calls = x.features.shape[0]
        return x

    def switches_a_norm(self, x):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(not module.training)
        return x

    def attribute_of_a_function(self, x):
        helper.calls = 1
        return x

    def switch_of_torch(self, x):
        torch.backends.cudnn.benchmark = False
        return x

    def changes_a_norm(self, x):
        self.b[1].momentum = 0.1
        return x

    def appends_to_a_global_under_another_name(self, x):
        log = SEEN
        log += [1]
        return x

    def writes_a_global(self, x):
        global COUNT
        COUNT += 1
        return x

    def attribute_of_another_module(self, x):
        closed_settings.LAST = x.features.shape[1]
        return x

    def attribute_of_a_class(self, x):
        type(self).last = 3
        return x

    def iterator(self, x):
        numbers = NUMBERS
        return times(x, 1.0 + next(numbers))

    def lock(self, x):
        with LOCK:
            return times(x, 1.0)

    def seeds_torch(self, x):
        torch.manual_seed(0)
        return x.replace_feature(x.features + torch.rand_like(x.features))

    def file(self, x):
        with open(os.devnull, "a") as file:
            file.write("a call")
        return x

    def hook_on_a_tensor(self, x):
        features = x.features * 1
        features.requires_grad_(True)
        features.register_hook(lambda gradient: gradient * 2)
        return x.replace_feature(features)

    def thread(self, x):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return x

    def branch_on_rows_by_a_local(self, x):
        n, _ = x.features.shape
        many = n > 10
        if many:
            x = times(x, 2.0)
        return x

    def loop_over_rows(self, x):
        for _ in range(x.features.shape[0] // 10):
            x = times(x, 1.01)
        return x

    def while_on_rows(self, x):
        n = x.features.numel()
        while n > 100:
            n //= 2
            x = times(x, 1.1)
        return x


for _name, _end in vars(Statements).items():
    if not _name.startswith("__"):
        opened(_name.replace("_", " "), _end)


# Conditions that end the call with an error, and the rows that they let pass.


@case("checks that there are rows")
class ChecksRows(Net):
    def end(self, x):
        assert x.features.shape[0] > 0 and len(x.features)
        if not x.indices.shape[0]:
            raise ValueError(x)
        return x


@case("checks that rows are not too many")
class ChecksMany(Net):
    def end(self, x):
        assert 0 < len(x.features) <= 10**6, "too many"
        if x.features.shape[0] >= 10**6 or len(x.indices) > 10**6:
            raise ValueError(f"{len(x.features)} rows")
        return x


@case("checks that tensors have the same rows")
class ChecksBoth(Net):
    def end(self, x):
        assert x.features.shape[0] == x.indices.shape[0]
        assert x.features.shape[1] == 8 and x.indices.shape[1] >= 4
        return x


@opened("checks that there are many rows")
class ChecksFew(Net):
    def end(self, x):
        assert x.features.shape[0] >= 5, "too few"
        return x


@opened("raises where rows are few")
class RaisesFew(Net):
    def end(self, x):
        if not (len(x.features) > 5 or self.scale > 2):
            raise ValueError("too few")
        return x


@opened("checks that rows are of a number")
class ChecksNumber(Net):
    def end(self, x):
        assert x.features.shape[0] != 7
        return x


@opened("checks that rows come in pairs")
class ChecksPairs(Net):
    def end(self, x):
        assert x.features.shape[0] % 2 >= 0
        return x


@opened("asks for bits of the number of rows")
class Bits(Net):
    def end(self, x):
        return times(x, 1.0 + (x.features.shape[0] & 64))


@opened("asks for the bytes of the features")
class Bytes(Net):
    def end(self, x):
        return times(x, 2.0 if x.features.nbytes > 4096 else 1.0)


@opened("leaves gradients on")
class LeavesGradients(Net):
    def end(self, x):
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return x
