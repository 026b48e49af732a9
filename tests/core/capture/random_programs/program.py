"""A random program: its parts, built step by step over a scene, and how each of its calls is made."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import sparse_bridge

from . import beside
from .layers import layer, layers_of
from .parts import Beside, Joined, Layer, OnFeatures, Part, Tensors, Whole, results_in
from .scenes import Scenes

KINDS = ["conv"] * 6 + ["down"] * 3 + ["up"] * 4 + ["pool", "special"] + ["beside"] * 4 + ["join"] * 2
ERRORS = (ValueError, RuntimeError, AssertionError, TypeError, KeyError, AttributeError)  # of layers that do not fit
MOST_ROWS, CALLS = 1500, 14
WAYS = ("parts", "parts", "whole", "unasked")
STRUCTURES = ("one", "list", "tuple", "dict", "nested")


class Mode(NamedTuple):
    """grad: record gradients, or the context that records none.  autocast: its dtype, or None."""

    grad: str
    autocast: torch.dtype | None

    @contextlib.contextmanager
    def entered(self, device):
        grad = torch.inference_mode() if self.grad == "inference" else torch.set_grad_enabled(self.grad == "train")
        with grad, contextlib.ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(torch.device(device).type, dtype=self.autocast))
            yield


class Call(NamedTuple):
    """make: makes its sparse tensor.  eager: the numbers of parts that run without replays."""

    make: Callable[[], object]
    mode: Mode
    eager: frozenset[int]
    dense: torch.Tensor
    scale: float | None


class Program:
    """model: parts in a row, each over the first result of the one before.  words: what is inside, counted.
    way: whether replays of its parts are asked for, of the whole, or none, and the bridge chooses modules.
    replayed: numbers of the parts that are.  dtype: of weights and inputs."""

    def __init__(self, module, name, trains, seed, device):
        self.name, self.trains, self.seed, self.device = name, trains, seed, device
        self.choose = choose = random.Random(f"{name}, {trains}, {seed}")
        torch.manual_seed(seed)
        self.layers, self.scenes = layers_of(module, name, choose), Scenes(module, name, choose, device, trains)
        self.tensors = Tensors(module, name)
        self.words: Counter[str] = Counter()
        self.dense = torch.randn(beside.DENSE, device=device)
        with sparse_bridge.eager(), torch.no_grad():
            self.model = Whole(self._parts(self.scenes.probe()()))
        self.dtype = choose.choice([torch.float32] * 5 + [torch.float16])
        if self.dtype != torch.float32:
            self.words["model in half"] += 1
        self.model = self.model.to(device, self.dtype).train(trains)
        count = len(self.model.parts)
        self.way, self.watched = choose.choice(WAYS), choose.random() < 0.5
        self.replayed = [n for n in range(count) if choose.random() < 0.8 or count == 1]
        self.words[f"replays of {self.way}"] += 1
        self.calls = self._calls()

    def __repr__(self):
        said = [f"{self.name}, seed {self.seed}, {'training' if self.trains else 'inference'}, {self.dtype}"]
        replayed = self.replayed if self.way == "parts" else self.way
        said += [f"{self.scenes}, replayed: {replayed}, watched: {self.watched}"]
        for number, call in enumerate(self.calls):
            x = call.make()
            rows = f"{len(self.tensors.coordinates(x))} rows"
            said.append(f"call {number}: {rows}, {call.mode}, eager {set(call.eager)}, scale {call.scale}")
        for number, part in enumerate(self.model.parts):
            said.append(f"part {number}: returns {part.structure}, also {part.also}, {part.extra}")
            for at, step in enumerate(part.steps):
                source = getattr(step, "sources", None) or step.source
                inside = getattr(step, "way", None) or getattr(step, "function", None) or step.layer
                said.append(f"  {at + 1} of {source}: {inside}")
        return "\n".join(said)

    def _parts(self, x):
        parts = []
        for _ in range(self.choose.choice([1, 1, 2, 3])):
            part, results = self._part(x)
            if not len(part.steps):
                continue
            parts.append(part)
            x = results[-1]
        return nn.ModuleList(parts)

    def _part(self, x):
        """A part over `x`, and its results."""
        choose, results, steps, words = self.choose, [x], [], []
        for _ in range(choose.randint(2, 7)):
            step, word = self._step(results)
            made = None
            if step is not None:
                step = step.to(self.device).eval()
                made = self._attempt(step, results)
            if made is None:
                continue
            steps.append(step.train(self.trains))
            results.append(made)
            words.append(word)
        also = [choose.randrange(len(results))] if choose.random() < 0.35 else []
        extra = choose.choice([None] * 6 + ["features"] + (["dense"] if self.name == "spconv" else []))
        structure = choose.choice(STRUCTURES if not also and extra is None else STRUCTURES[1:])
        words += [structure] + ["several results"] * len(also) + ([] if extra is None else [f"result: {extra}"])
        self.words.update(words)
        part = Part(self.tensors, steps, also, structure, extra)
        return part, results

    def _attempt(self, step, results):
        """What a step makes of the scene, where it makes something of it."""
        try:
            made = step(results, Beside(self.dense))
        except ERRORS:
            return None
        return made if 8 < len(self.tensors.coordinates(made)) < MOST_ROWS else None

    def _step(self, results):
        choose = self.choose
        source = len(results) - 1 if choose.random() < 0.85 else choose.randrange(len(results))
        x, kind = results[source], choose.choice(KINDS)
        width = self.tensors.features(x).shape[1]
        if kind == "join":
            return self._join(results)
        if kind == "beside":
            ways = beside.OFTEN if choose.random() < 0.93 else beside.REFUSED
            function = beside.Function(choose.choice(ways), width, choose.choice([width, 6, 5]))
            return OnFeatures(self.tensors, function, source), function.way
        made, word = layer(self.layers, kind, x, width, choose)
        return Layer(made, source), word

    def _join(self, results):
        choose, rows = self.choose, [self.tensors.coordinates(x) for x in results]
        same = [n for n, coords in enumerate(rows[:-1]) if torch.equal(coords, rows[-1])]
        if not same:
            return None, ""
        widths = [self.tensors.features(x).shape[1] for x in results]
        sources = (len(results) - 1, choose.choice(same))
        way = "add" if widths[sources[0]] == widths[sources[1]] and choose.random() < 0.6 else "cat"
        return Joined(self.tensors, way, sources), way

    def _calls(self):
        choose, calls, count = self.choose, [], len(self.model.parts)
        half = self.dtype != torch.float32
        autocast = choose.choice([None] * 3 + ([] if half else [torch.float16, torch.bfloat16]))
        switches = autocast is not None and choose.random() < 0.4
        mixed, looks = choose.random() < 0.3, choose.choice(["no_grad", "no_grad", "inference"])
        scale, grad = choose.choice([None, None, 2.0]), choose.random() < 0.2 and self.trains
        for word, inside in (("autocast", autocast), ("autocast switched", switches), ("modes mixed", mixed)):
            self.words[word] += bool(inside)
        self.words[f"range {self.scenes.range_kind}"] += self.scenes.range_kind != "none"
        self.words["irregular scenes"] += self.scenes.irregular > 0
        for number in range(CALLS):
            way = "train" if self.trains else looks
            if mixed and choose.random() < 0.2:
                way = choose.choice(["no_grad", "inference"])
            cast = autocast if not switches or number % 5 < 3 else None
            eager = {choose.randrange(count)} if number > 4 and number % 5 == 0 and count else ()
            scene = self.scenes.scene(number, self.dtype, grad)
            calls.append(Call(scene, Mode(way, cast), frozenset(eager), self.dense.to(self.dtype), scale))
            scale = scale if choose.random() < 0.97 else 0.5
        return calls


def run(model, call, device, way):
    """What the parts return in a call: sparse tensors and tensors."""
    x = call.make()
    with call.mode.entered(device), contextlib.ExitStack() as stack:
        if way != "parts":
            if call.eager:
                stack.enter_context(sparse_bridge.eager())
            return results_in(model(x, call.dense, call.scale))
        results = []
        for number, part in enumerate(model.parts):
            with sparse_bridge.eager() if number in call.eager else contextlib.nullcontext():
                results.append(results_in(part(x, call.dense, call.scale)))
            x = results[-1][0]
    return [result for made in results for result in made]
