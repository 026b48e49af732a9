"""Programs that do something in front of their sparse layers, or read what changes with every call."""

from __future__ import annotations

import collections
import logging
import os
import random
import sys
import time

import numpy as np
import torch
from torch import nn

from sparse_bridge.adapters import protocol

from . import apis

COUNTS: collections.Counter[str] = collections.Counter()
SEEN: set[int] = set()
TOTAL = 0
CALL = [0]  # the number of the call, which the program sets
_log = logging.getLogger(__name__)


def imitated():
    """Whether a graph is replayed that only a CPU imitates, by running what was captured."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("pretended.py"):
        frame = frame.f_back
    return frame is not None


def count(key):
    COUNTS[key] += 1


class Front(nn.Module):
    """Makes its sparse tensor itself; the network is a part of it."""

    history: list[int]

    def __init__(self, module, name):
        super().__init__()
        self.net, self.module, self.name = apis.network(module, name, "cpu"), module, name
        self.history, self.table, self.calls, self.scale = [], {"n": 0}, 0, 1.0
        self.size = 0
        self.rng = np.random.RandomState(0)

    def forward(self, values, coords):
        values = self.before(values, coords)
        x = apis.tensor(self.module, self.name, coords, values)
        return self.behind(self.net(x))

    def before(self, values, coords):
        return values

    def behind(self, out):
        return out


class Plain(Front): ...


class Prints(Front):
    def before(self, values, coords):
        print("front")
        return values


class PrintsInline(Front):
    def forward(self, values, coords):
        print("front")
        return self.net(apis.tensor(self.module, self.name, coords, values))


class Logs(Front):
    def before(self, values, coords):
        _log.info("front")
        return values


class CountsByHelper(Front):
    def before(self, values, coords):
        count("helper")
        return values


class CountsInline(Front):
    def forward(self, values, coords):
        COUNTS["inline"] += 1
        return self.net(apis.tensor(self.module, self.name, coords, values))


class CountsOnSelf(Front):
    def before(self, values, coords):
        self.calls += 1
        return values


class CountsInGlobal(Front):
    def before(self, values, coords):
        global TOTAL
        TOTAL += 1
        return values


class Appends(Front):
    def before(self, values, coords):
        self.history.append(len(self.history))
        return values


class WritesTable(Front):
    def before(self, values, coords):
        self.table["n"] = self.table["n"] + 1
        return values


class AddsToSet(Front):
    def before(self, values, coords):
        SEEN.add(len(SEEN))
        return values


class DrawsPython(Front):
    def before(self, values, coords):
        return values * (1 + 0.1 * random.random())


class DrawsNumpy(Front):
    def before(self, values, coords):
        return values * float(1 + 0.1 * np.random.rand())


class DrawsOwn(Front):
    def before(self, values, coords):
        return values * float(1 + 0.1 * self.rng.rand())


class Looks(Front):
    """Reads clocks, the environment and values of tensors, and keeps a number that does not depend on the last one."""

    def before(self, values, coords):
        start, flag = time.perf_counter(), os.environ.get("NO_SUCH_FLAG")
        self.size = int(coords.max()) + 1
        items = [part * 1.0 for part in values.split(2, 1)]
        items.append(values[:, :0])
        if time.perf_counter() < start or flag:
            raise ValueError(f"{start}")
        return torch.cat(items, 1)


class Late(Front):
    """Says something in each fourth call, but not in the first twelve. Its features require a gradient."""

    def __init__(self, module, name):
        super().__init__(module, name)
        self.gain = nn.Parameter(torch.ones(4))

    def before(self, values, coords):
        if CALL[0] >= 12 and not CALL[0] % 4 and not imitated():
            print("late")
        return values * self.gain


EFFECTS = [
    Prints,
    PrintsInline,
    Logs,
    CountsByHelper,
    CountsInline,
    CountsOnSelf,
    CountsInGlobal,
    Appends,
    WritesTable,
    AddsToSet,
    DrawsPython,
    DrawsNumpy,
    DrawsOwn,
]


class ReadsStep(Front):
    """Its own counter decides what it prints behind the network."""

    def before(self, values, coords):
        self.calls += 1
        return values

    def behind(self, out):
        if self.calls % 1000 == 999:
            print("thousand")
        return out


class Scheduled(Front):
    """The program sets `scale` before each call."""

    def behind(self, out):
        return {key: protocol.of(value).features_of(value) * self.scale for key, value in out.items()}


class KeepsSize(Front):
    """What it keeps of each call follows from the scene, and is read behind."""

    def before(self, values, coords):
        self.size = self.size % 7 + 1
        return values

    def behind(self, out):
        return out if self.size < 100 else None


CHANGING = [ReadsStep, KeepsSize]


def state(model):
    """What calls have left."""
    draws = random.getstate(), repr(np.random.get_state()), repr(model.rng.get_state())
    return dict(COUNTS), sorted(SEEN), TOTAL, list(model.history), dict(model.table), model.calls, model.size, draws


def reset():
    global TOTAL
    TOTAL = 0
    COUNTS.clear()
    SEEN.clear()
    random.seed(0)
    np.random.seed(0)


def arguments(module, name, seed, device):
    x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
    framework = protocol.of(x)
    return framework.features_of(x), framework.coordinates_of(x)
