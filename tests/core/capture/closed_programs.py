"""Programs whose Python is read, written or called by a model: which a replay must not change.

Each is a class; `case` says whether its world is closed, and for closed ones what may change after the call.
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.backends.mps import is_available

from tests.core.capture import closed_settings
from tests.core.capture.closed_settings import FACTOR

CASES: dict[str, tuple] = {}  # name: (class, changes; None where the world is open)


def case(name, *changes):
    """A program with a closed world. changes: functions of the model, each of which a guard has to notice."""

    def enter(cls):
        CASES[name] = cls, changes
        return cls

    return enter


def opened(name):
    """A program with an open world."""

    def enter(cls):
        CASES[name] = cls, None
        return cls

    return enter


def times(x, value):
    return x.replace_feature(x.features * value)


class Net(nn.Module):
    def __init__(self, sp):
        super().__init__()

        def block(n_in, n_out, key):
            conv = sp.SubMConv3d(n_in, n_out, 3, bias=False, indice_key=key)
            return sp.SparseSequential(conv, nn.BatchNorm1d(n_out), nn.ReLU())

        self.a, self.b = block(4, 8, "a"), block(8, 8, "a")
        self.scale, self.calls, self.kept, self.sizes = 1.0, 0, {}, []

    def forward(self, x):
        return self.end(self.b(self.a(x)))

    def end(self, x):
        return x


# the model's attributes


def set_attribute(name, value, path=""):
    return lambda m: setattr(m.get_submodule(path), name, value)


def hook(m):
    m.a[1].register_forward_hook(lambda module, inputs, output: output + 1)


def swap(m):
    setattr(m.b, "2", nn.LeakyReLU(0.1))


def new_forward(m):
    m.a[2].forward = lambda x: x


def new_class(m):
    m.__class__ = Doubled


case(
    "plain",
    set_attribute("momentum", 0.5, "a.1"),
    set_attribute("eps", 1e-2, "a.1"),
    set_attribute("training", False, "b.1"),
    set_attribute("inplace", True, "a.2"),
    set_attribute("end", lambda x: x),
    hook,
    swap,
    new_forward,
    new_class,
)(Net)


class Doubled(Net):
    def end(self, x):
        return times(x, 2.0)


@case("attribute", set_attribute("scale", 0.5), set_attribute("scale", 1), set_attribute("scale", True))
class Attribute(Net):
    def end(self, x):
        return times(x, self.scale)


@opened("counts its calls")
class Counts(Net):
    def end(self, x):
        self.calls += 1
        return times(x, self.calls)


@opened("caches in a dictionary")
class Caches(Net):
    def end(self, x):
        return times(x, self.kept.setdefault(x.features.shape[0] % 7, len(self.kept) + 1))


@opened("writes an entry of a dictionary")
class Entries(Net):
    def end(self, x):
        self.kept["last"] = x.features.shape[1]
        return x


@case("writes in a branch that is not taken", set_attribute("sizes", [1]))
class NotTaken(Net):
    def end(self, x):
        if x.features.shape[1] > 1000:
            self.sizes.append(1)
        return x


@opened("appends through a helper")
class Helped(Net):
    def end(self, x):
        note(self.sizes, x.features.shape[1])
        return x


def note(log, value):
    log.append(value)


@opened("writes through a helper")
class HelpedEntry(Net):
    def end(self, x):
        enter(self.kept, x.features.shape[1])
        return x


note.factor = 1.0


def enter(table, value):
    table["width"] = value


def change_inner(m):
    m.config["w"][1] = 7.0


@case("list in a dictionary", change_inner, lambda m: m.config["w"].append(1.0), lambda m: m.config.clear())
class Inner(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.config = {"w": [1.0, 2.0]}

    def end(self, x):
        return times(x, self.config["w"][1])


@case("array of numpy", lambda m: m.size.fill(3))
class Array(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.size = np.array([2, 2, 2])

    def end(self, x):
        return times(x, float(self.size[0]))


@case("set of names", lambda m: m.names.discard("b"))
class Names(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.names = {"a", "b"}

    def end(self, x):
        return times(x, 2.0) if "b" in self.names else x


def move_hidden(m):
    Hidden.factor = 3.0


def hide(m):
    m.factor = 3.0


@case("class attribute", move_hidden, hide)
class Hidden(Net):
    factor = 1.0

    def end(self, x):
        return times(x, self.factor)


class AllRates:
    rate = 1.0


class Rates(AllRates):
    pass


def hide_in_class(m):
    Rates.rate = 3.0


@case("attribute of a base class", hide_in_class, lambda m: setattr(m.rates, "rate", 3.0))
class Inherited(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.rates = Rates()

    def end(self, x):
        return times(x, self.rates.rate)


def other_method(m):
    Patched.end = lambda self, x: times(x, 3.0)


@case("method replaced", other_method)
class Patched(Net):
    def end(self, x):
        return times(x, 2.0)


@case("property", set_attribute("scale", 0.5))
class Property(Net):
    @property
    def factor(self):
        return self.scale * 2

    def end(self, x):
        return times(x, self.factor)


@case("attribute found by name", set_attribute("scale", 0.5))
class ByName(Net):
    def end(self, x):
        return times(x, getattr(self, "sca" + "le"))


@case("attribute that may be missing", set_attribute("extra", 2.0))
class Missing(Net):
    def end(self, x):
        return times(x, getattr(self, "extra", 1.0))


@case("__getattr__", lambda m: m.table.values.update(scale=3.0))
class Getattr(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.table = Table({"scale": 1.0})

    def end(self, x):
        return times(x, self.table.scale)


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


@case("dictionary with attributes", lambda m: setattr(m.config, "w", 2.0))
class Easy(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.config = Config(w=1.0)

    def end(self, x):
        return times(x, self.config.w)


@dataclasses.dataclass
class Settings:
    width: float = 1.0
    names: list = dataclasses.field(default_factory=lambda: [1.0])


@case("dataclass", lambda m: setattr(m.settings, "width", 2.0), lambda m: m.settings.names.append(1))
class WithDataclass(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.settings = Settings()

    def end(self, x):
        return times(x, self.settings.width * len(self.settings.names))


class Slotted:
    __slots__ = ("width",)

    def __init__(self):
        self.width = 1.0


@case("slots", lambda m: setattr(m.slotted, "width", 2.0))
class WithSlots(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.slotted = Slotted()

    def end(self, x):
        return times(x, self.slotted.width)


Pair = collections.namedtuple("Pair", "width height")


@case("named tuple", lambda m: setattr(m, "pair", Pair(2.0, 1.0)))
class Named(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.pair = Pair(1.0, 1.0)

    def end(self, x):
        return times(x, self.pair.width)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@case("enum", lambda m: setattr(m, "mode", Mode.DOUBLE))
class WithEnum(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.mode = Mode.PLAIN

    def end(self, x):
        return times(x, 2.0) if self.mode is Mode.DOUBLE else x


@case("partial", lambda m: setattr(m, "act", functools.partial(times, value=3.0)))
class Partial(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.act = functools.partial(times, value=2.0)

    def end(self, x):
        return self.act(x)


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return times(x, self.factor)


@case("object that is called", lambda m: setattr(m.scaler, "factor", 2.0))
class Called(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.scaler = Scaler(1.0)

    def end(self, x):
        return self.scaler(x)


class Meter:
    def __init__(self):
        self.total = 0

    def add(self, value):
        self.total += value


@opened("object that counts")
class Metered(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.meter = Meter()

    def end(self, x):
        self.meter.add(1)
        return x


class Wrapped:
    def __init__(self, x):
        self.x = x

    def scaled(self, value):
        self.x = times(self.x, value)
        return self


@case("object made in the call", set_attribute("scale", 0.5))
class MadeInCall(Net):
    def end(self, x):
        return Wrapped(x).scaled(self.scale).x


@case("branch by flag", set_attribute("early", True))
class ByFlag(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.early = False

    def forward(self, x):
        x = self.a(x)
        if self.early:
            return x
        return self.end(self.b(x))


@case("branch by class", lambda m: setattr(m, "head", nn.ReLU()))
class ByClass(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.head = nn.Identity()

    def end(self, x):
        return times(x, 2.0) if isinstance(self.head, nn.Identity) else x


@case("list of modules", lambda m: m.parts.pop())
class Parts(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.parts = [nn.ReLU(), nn.Identity()]

    def end(self, x):
        for part in self.parts:
            x = x.replace_feature(part(x.features))
        return x


@opened("list of modules with weights")
class HiddenWeights(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.parts = [nn.Linear(8, 8)]

    def end(self, x):
        return x.replace_feature(self.parts[0](x.features))


@opened("dictionary of tensors")
class Tensors(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.tensors = {"w": torch.ones(8)}

    def end(self, x):
        return times(x, self.tensors["w"])


@opened("keeps an average of weights")
class Average(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.mean = {}

    def end(self, x):
        for name, parameter in self.named_parameters():
            self.mean[name] = parameter.detach().clone()
        return x


@case("layers in a loop", set_attribute("scale", 2.0))
class Loops(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.acts = nn.ModuleList([nn.ReLU() for _ in range(3)])

    def end(self, x):
        outputs = []
        for i in range(len(self.acts)):
            outputs.append(self.acts[i](x.features))
        for i, act in enumerate(self.acts):
            outputs[i] = act(outputs[i]) * self.scale
        merged = {f"level{i}": value for i, value in enumerate(outputs)}
        merged["sum"] = torch.stack(list(merged.values())).sum(0)
        return x.replace_feature(merged["sum"])


@case("cached attribute that is there", set_attribute("width", 3.0))
class Lazy(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.width = 2.0

    def end(self, x):
        return times(x, self.width if hasattr(self, "width") else 1.0)


@opened("cached attribute that is not there yet")
class LazyNew(Net):
    def end(self, x):
        if not hasattr(self, "width"):
            self.width = 2.0
        return times(x, self.width)


# globals, closures, defaults

ALPHA, SEEN, TABLE, COUNT = 1.0, [], {"w": [1.0]}, 0
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


def set_global(name, value):
    return lambda m: globals().__setitem__(name, value)


@case("global", set_global("ALPHA", 0.25))
class Global(Net):
    def end(self, x):
        return times(x, ALPHA)


@case("global list", lambda m: SEEN.append(1))
class GlobalList(Net):
    def end(self, x):
        return times(x, 1.0 + len(SEEN))


@case("global dictionary", lambda m: TABLE["w"].insert(0, 4.0))
class GlobalTable(Net):
    def end(self, x):
        return times(x, TABLE["w"][0])


@case("global object", lambda m: setattr(LIMITS, "high", 3.0))
class GlobalObject(Net):
    def end(self, x):
        return times(x, LIMITS.high)


@case("global of another module", lambda m: setattr(closed_settings, "SCALE", 3.0))
class OtherModule(Net):
    def end(self, x):
        return times(x, closed_settings.SCALE)


@case("function of another module", lambda m: setattr(closed_settings, "FACTORS", {"x": 3.0}))
class OtherFunction(Net):
    def end(self, x):
        return times(x, closed_settings.factor("x"))


@case("imported inside", lambda m: setattr(closed_settings, "SCALE", 5.0))
class Imports(Net):
    def end(self, x):
        from tests.core.capture import closed_settings as settings

        return times(x, settings.SCALE * FACTOR)


@case("class of settings", lambda m: setattr(closed_settings.Options, "width", 3.0))
class OtherClass(Net):
    def end(self, x):
        return times(x, closed_settings.Options.width)


@case("function replaced", set_global("helper", lambda x: times(x, 3.0)))
class Replaced(Net):
    def end(self, x):
        return helper(x)


def helper(x):
    return times(x, 2.0)


def other_relu(m):
    F.hardtanh = F.relu6


@case("function of torch replaced", other_relu)
class TorchReplaced(Net):
    def end(self, x):
        return x.replace_feature(F.hardtanh(x.features))


@opened("appends to a global")
class Appends(Net):
    def end(self, x):
        SEEN.append(x.features.shape[1])
        return x


@opened("appends to a global in a branch that is not taken")
class AppendsNever(Net):
    def end(self, x):
        if self.calls:
            SEEN.append(1)
        return x


@case("writes the same again", set_global("MODE", "other"), set_attribute("calls", 1))
class WritesSame(Net):
    def end(self, x):
        global MODE
        MODE, self.calls = "plain", 0
        return x


@opened("keeps how many rows there are")
class KeepsRows(Net):
    def end(self, x):
        self.calls = x.features.shape[0]
        return x


@opened("switches a norm")
class SwitchesNorm(Net):
    def end(self, x):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(not module.training)
        return x


@case("norm that stays in evaluation", set_attribute("training", True, "a.1"))
class StaysEval(Net):
    def train(self, mode=True):
        super().train(mode)
        self.a[1].eval()
        return self

    def forward(self, x):
        self.a[1].eval()
        return super().forward(x)


@opened("counter of collections")
class CounterUpdate(Net):
    def end(self, x):
        NUMBER_OF.update(["call"])
        return x


@opened("dictionary that grows when it is read")
class Growing(Net):
    def end(self, x):
        return times(x, 1.0 + len(GROWING[x.features.shape[1]]))


@opened("heap")
class Heap(Net):
    def end(self, x):
        heapq.heappush(SEEN, 1)
        return x


@opened("entry set by its method")
class SetItem(Net):
    def end(self, x):
        dict.__setitem__(TABLE, "calls", 1)
        return x


@opened("list changed by its class")
class Unbound(Net):
    def end(self, x):
        list.append(SEEN, 1)
        return x


@opened("attribute of a function")
class FunctionCounts(Net):
    def end(self, x):
        helper.calls = 1
        return x


@case("attribute of a function that is read", lambda m: setattr(note, "factor", 2.0))
class FunctionAttribute(Net):
    def end(self, x):
        return times(x, note.factor)


@opened("class that counts")
class ClassCounts(Net):
    total = 0

    @classmethod
    def count(cls):
        cls.total += 1

    def end(self, x):
        self.count()
        return x


@opened("date")
class Date(Net):
    def end(self, x):
        return times(x, float(datetime.datetime.now().year > 0))


@opened("dictionary of the object")
class OwnDict(Net):
    def end(self, x):
        self.__dict__.update(last=object())
        return x


@opened("switch of torch")
class Switches(Net):
    def end(self, x):
        torch.backends.cudnn.benchmark = False
        return x


@opened("path by the stack")
class Stack(Net):
    def end(self, x):
        return times(x, 1.0 + 0 * len(inspect.stack()))


@opened("replaces a buffer")
class ReplacesBuffer(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("mean", torch.zeros(8))

    def end(self, x):
        self.mean = self.mean * 0.9 + x.features.mean(0) * 0.1
        return x


@opened("changes a norm")
class ChangesNorm(Net):
    def end(self, x):
        self.b[1].momentum = 0.1
        return x


@opened("appends to a global under another name")
class AppendsAlias(Net):
    def end(self, x):
        log = SEEN
        log += [1]
        return x


@opened("writes a global")
class WritesGlobal(Net):
    def end(self, x):
        global COUNT
        COUNT += 1
        return x


@opened("counter in another module")
class CountsElsewhere(Net):
    def end(self, x):
        closed_settings.count()
        return x


@opened("attribute of another module")
class WritesElsewhere(Net):
    def end(self, x):
        closed_settings.LAST = x.features.shape[1]
        return x


@opened("attribute of a class")
class WritesClass(Net):
    last = None

    def end(self, x):
        type(self).last = 3
        return x


@opened("attribute of its class by name")
class WritesClassByName(Net):
    last = None

    def end(self, x):
        setattr(WritesClassByName, "last", 3)  # noqa: B010
        return x


CELL, MODE = [3.0], "plain"


def closing(cell):
    class Closure(Net):
        def end(self, x):
            return times(x, cell[0])

    return Closure


case("closure", lambda m: CELL.__setitem__(0, 5.0))(closing(CELL))


def counting():
    calls = 0

    class Counter(Net):
        def end(self, x):
            nonlocal calls
            calls += 1
            return x

    return Counter


opened("counter in a closure")(counting())


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


DECORATED = {"factor": 1.0}


@case("decorator", lambda m: DECORATED.update(factor=2.0))
class Decorated(Net):
    @scaled_by(DECORATED)
    def end(self, x):
        return x


@opened("decorator that remembers")
class Remembers(Net):
    @remembering
    def end(self, x):
        return x


@opened("default that is a list")
class DefaultList(Net):
    def end(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        return x


def scaled(x, factors=[1.0]):  # noqa: B006
    return times(x, factors[0])


@case("default that is read", lambda m: scaled.__defaults__[0].append(2.0))
class DefaultRead(Net):
    def end(self, x):
        return scaled(x)


@functools.lru_cache
def cached(width):
    return width * 2


@opened("lru_cache")
class Cached(Net):
    def end(self, x):
        return times(x, cached(x.features.shape[1]))


def other_answer(m):
    globals()["is_available"] = lambda: True


@case("lru_cache of torch", other_answer)
class CachedByTorch(Net):
    def end(self, x):
        return times(x, 2.0) if is_available() else x


disguised = functools.update_wrapper(functools.lru_cache(lambda: len(SEEN)), is_available)


@opened("lru_cache that says it is torch's")
class Disguised(Net):
    def end(self, x):
        return times(x, disguised())


@opened("cached property")
class CachedProperty(Net):
    @functools.cached_property
    def factor(self):
        return 2.0

    def end(self, x):
        return times(x, self.factor)


@opened("itertools.count")
class Ticks(Net):
    def end(self, x):
        return times(x, 1.0 + next(TICKS))


@opened("iterator")
class Iterator(Net):
    def end(self, x):
        numbers = NUMBERS
        return times(x, 1.0 + next(numbers))


@opened("generator")
class Generates(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.numbers = numbers()

    def end(self, x):
        return times(x, next(self.numbers))


@opened("generator in a loop")
class GeneratesLoop(Generates):
    def end(self, x):
        for number in self.numbers:
            return times(x, number)


def numbers():
    n = 0
    while True:
        n += 1
        yield n


@case("generator of the call", set_attribute("scale", 0.5))
class OwnGenerator(Net):
    def parts(self, x):
        yield x.features * self.scale
        yield x.features

    def end(self, x):
        return x.replace_feature(sum(part for part in self.parts(x)))


@opened("context variable")
class Context(Net):
    def end(self, x):
        return times(x, CONTEXT.get())


@opened("thread local")
class ThreadLocal(Net):
    def end(self, x):
        return times(x, LOCAL.factor)


@opened("weak reference")
class Weak(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.settings = Settings()
        self.reference = weakref.ref(self.settings)

    def end(self, x):
        return times(x, self.reference().width)


@opened("lock")
class Locked(Net):
    def end(self, x):
        with LOCK:
            return times(x, 1.0)


@opened("global tensor")
class GlobalTensor(Net):
    def end(self, x):
        return times(x, WEIGHT)


# what it calls


@opened("prints")
class Prints(Net):
    def end(self, x):
        print("rows", x.features.shape[1])
        return x


@opened("prints elsewhere")
class PrintsElsewhere(Net):
    def end(self, x):
        closed_settings.say("a call")
        return x


@opened("writes to stderr")
class Stderr(Net):
    def end(self, x):
        sys.stderr.write("")
        return x


@opened("logs")
class Logs(Net):
    def end(self, x):
        LOG.warning("a call")
        return x


@opened("logs nothing yet")
class LogsDebug(Net):
    def end(self, x):
        LOG.debug("a call")
        return x


@opened("warns")
class Warns(Net):
    def end(self, x):
        warnings.warn("a call", stacklevel=1)
        return x


@opened("environment")
class Environment(Net):
    def end(self, x):
        return times(x, float(os.environ.get("CLOSED_FACTOR", "1")))


@opened("getenv")
class Getenv(Net):
    def end(self, x):
        return times(x, float(os.getenv("CLOSED_FACTOR", "1")))


@opened("clock")
class Clock(Net):
    def end(self, x):
        return times(x, 1.0 + 0 * time.perf_counter())


@opened("random numbers of Python")
class Randoms(Net):
    def end(self, x):
        return times(x, random.random())


@opened("random integers of Python")
class RandomIntegers(Net):
    def end(self, x):
        return times(x, random.randint(1, 2))


@opened("random numbers of numpy")
class NumpyRandoms(Net):
    def end(self, x):
        return times(x, float(np.random.rand()))


@opened("generator of numpy")
class NumpyGenerator(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.random = np.random.default_rng(1)

    def end(self, x):
        return times(x, float(self.random.random()))


@case("random numbers of torch")
class TorchRandoms(Net):
    def end(self, x):
        return x.replace_feature(x.features + torch.rand_like(x.features) + torch.rand(x.features.shape))


@opened("generator of torch")
class TorchGenerator(Net):
    def end(self, x):
        return x.replace_feature(x.features + torch.rand(8, generator=GENERATOR))


@opened("seeds torch")
class Seeds(Net):
    def end(self, x):
        torch.manual_seed(0)
        return x.replace_feature(x.features + torch.rand_like(x.features))


@opened("file")
class File(Net):
    def end(self, x):
        with open(os.devnull, "a") as file:
            file.write("a call")
        return x


@opened("identity")
class Identity(Net):
    def end(self, x):
        return times(x, 1.0 + id(x) % 2)


@opened("exec")
class Executes(Net):
    def end(self, x):
        exec("ALPHA")
        return x


@opened("globals()")
class Globals(Net):
    def end(self, x):
        return times(x, globals()["ALPHA"])


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


@opened("bar of progress")
class Progress(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.bar = Bar()

    def end(self, x):
        with self.bar as bar:
            bar.update()
        return x


@opened("callback")
class Callback(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.callbacks = [SEEN.append]

    def end(self, x):
        for callback in self.callbacks:
            callback(x.features.shape[1])
        return x


@opened("hook on a tensor")
class TensorHook(Net):
    def end(self, x):
        features = x.features * 1
        features.requires_grad_(True)
        features.register_hook(lambda gradient: gradient * 2)
        return x.replace_feature(features)


@opened("thread")
class Threads(Net):
    def end(self, x):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return x


# what it chooses by


@opened("branch on data")
class Branches(Net):
    def end(self, x):
        return times(x, 2.0) if x.features.max().item() > 1.5 else x


@opened("branch on a tensor")
class BranchesTensor(Net):
    def end(self, x):
        return times(x, 2.0) if x.features.max() > 1.5 else x


@opened("number of a tensor")
class Number(Net):
    def end(self, x):
        return times(x, float(x.features.max()))


@opened("tensor in a text")
class Text(Net):
    def end(self, x):
        return times(x, float(len(f"{x.features.max():.1f}")))


@opened("branch on rows")
class BranchesRows(Net):
    def end(self, x):
        return times(x, 2.0) if x.features.shape[0] > 10 else x


@opened("branch on rows by a local")
class BranchesLocal(Net):
    def end(self, x):
        n, _ = x.features.shape
        many = n > 10
        if many:
            x = times(x, 2.0)
        return x


@opened("branch on the length of a tensor")
class BranchesLength(Net):
    def end(self, x):
        return times(x, 2.0) if len(x.features) > 10 else x


@opened("branch on rows by way of a function")
class BranchesHelper(Net):
    def end(self, x):
        return times(x, 2.0) if is_large(x.features.size(0)) else x


def is_large(n):
    return n > 10


@opened("branch in a function on rows")
class BranchesInside(Net):
    def end(self, x):
        return times(x, weight_of(x.indices.shape[0]))


def weight_of(n):
    if n > 10:
        return 1.0
    return 2.0


@opened("loop over rows")
class LoopsRows(Net):
    def end(self, x):
        for _ in range(x.features.shape[0] // 10):
            x = times(x, 1.01)
        return x


@opened("table by rows")
class TableRows(Net):
    def end(self, x):
        return times(x, [1.0, 2.0, 3.0][x.features.shape[0] % 3])


@opened("while on rows")
class WhileRows(Net):
    def end(self, x):
        n = x.features.numel()
        while n > 100:
            n //= 2
            x = times(x, 1.1)
        return x


@case("branch on channels", set_attribute("scale", 0.5))
class Channels(Net):
    def end(self, x):
        n, c = x.features.shape
        if c == 8 and x.features.shape[1] == 8 and x.features.shape[-1] == 8 and x.features.dim() == 2:
            x = times(x, self.scale)
        return x.replace_feature(x.features.view(n, c) + torch.zeros(n, c))


@case("assertions on shapes")
class Asserts(Net):
    def end(self, x):
        assert x.features.shape[0] == x.indices.shape[0], f"{x.features.shape}"
        if x.features.shape[0] == 0:
            raise ValueError("no rows")
        return x


# grammar


@case("with-statement")
class With(Net):
    def end(self, x):
        with torch.no_grad(), contextlib.nullcontext(), torch.autocast("cpu", enabled=False):
            return times(x, math.sqrt(2.0) * operator.mul(2.0, 1.0))


@contextlib.contextmanager
def doubling():
    yield 2.0


@case("context of its own")
class OwnContext(Net):
    def end(self, x):
        with doubling() as factor:
            return times(x, factor)


@case("try and except", set_attribute("kept", {"w": 2.0}))
class Tries(Net):
    def end(self, x):
        try:
            return times(x, self.kept["w"])
        except KeyError:
            return x


@case("texts and lists", set_attribute("scale", 0.5))
class Texts(Net):
    def end(self, x):
        names = [f"{name}:{self.scale:.1f}" for name in ("a", "b")]
        table = {name: float(name.partition(":")[2]) for name in names}
        table.update(c=1.0)
        total, (first, *rest) = 0.0, sorted(table.values())
        for value in [first, *rest]:
            total += value
        return times(x, total if (n := len(names)) == 2 else n)


@case("lambda", set_attribute("scale", 0.5))
class Lambda(Net):
    def end(self, x):
        double = lambda y: y * self.scale  # noqa: E731
        return x.replace_feature(double(x.features))


@case("base class", lambda m: setattr(m, "scale", 3.0))
class Inherits(Attribute):
    def end(self, x):
        return super().end(times(x, 2.0))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 2 * x * gradient


@case("function of autograd")
class Autograd(Net):
    def end(self, x):
        return x.replace_feature(Square.apply(x.features))


class LoudSquare(Square):
    @staticmethod
    def backward(context, gradient):
        print("backward")
        return gradient


@opened("backward that prints")
class AutogradPrints(Net):
    def end(self, x):
        return x.replace_feature(LoudSquare.apply(x.features))


@case("attributes that it does not read")
class Unread(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.logger, self.lock, self.epoch = LOG, LOCK, 0

    def end(self, x):
        return x
