"""Programs that do something with a model whose inference has been replayed: what they find, to be compared."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import pickletools
import threading
import types
import weakref
import zipfile
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import sparse_bridge
from sparse_bridge.core.capture import graph_regions

from . import apis


def scaled(module, factor):
    """A copy of a module with other parameters."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.data.mul_(factor)
    return copied


def exchanged(out):
    """What a forward of the program's own makes of the output."""
    return {"out": out["deep"], "deep": out["out"]}


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return None


def a_shallow_copy(model, calls):
    copied = copy.copy(model)
    copied._modules = {name: scaled(part, 1.3) for name, part in model._modules.items()}
    return [calls(one) for _ in range(6) for one in (copied, model)], copied.forward.__self__ is copied


def replicas(model, calls):
    found = []
    for factor in (0.5, 2):
        replica = model._replicate_for_data_parallel()
        for name, part in model._modules.items():
            replica._modules[name] = scaled(part, factor)
        found += [calls(replica), calls(model), calls(nn.DataParallel(replica))]
    return found


def deep_copies(model, calls):
    one, other = copy.deepcopy([model, model])
    inner = copy.deepcopy(model.head)
    model.head = scaled(inner, 2)
    return one is other, calls.times(one), calls.times(model), one.forward.__self__ is one


def an_average(model, calls):
    average = AveragedModel(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        average.update_parameters(model)
    return calls.times(average), calls.times(model)


def a_pickle(model, calls):
    """Whoever reads it needs no more than without."""
    parts = [model.stem, model.deep, model.head]
    model.stem, model.deep, model.head = pickle.loads(pickle.dumps(parts))
    file = io.BytesIO()
    torch.save(model.head, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        operations = list(pickletools.genops(archive.read(name)))
    return sorted({text for operation, text, _ in operations if operation.name == "GLOBAL"}), calls.times(model)


def a_method_of_its_own(model, calls):
    model.forward = types.MethodType(lambda self, x: exchanged(type(self).forward(self, x)), model)
    found = calls.times(model)
    del model.forward
    return found, calls.times(model), error_of(lambda: delattr(model, "forward"))


def a_wrapper(model, calls):
    own = model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return exchanged(own(*args, **kwargs))

    model.forward = forward
    found = calls.times(model), str(inspect.signature(model.forward)), model.forward.__wrapped__ == own
    copied = copy.copy(model)
    model.forward = own
    return found, calls(copied), calls.times(model)


def another_forward_of_the_class(model, calls):
    cls, own = type(model), type(model).forward
    cls.forward = lambda self, x: exchanged(own(self, x))
    found = calls.times(model)
    cls.forward = own
    return found, calls.times(model)


def mocks(model, calls):
    cls = type(model)
    counts = []
    with mock.patch.object(cls, "forward", autospec=True, side_effect=cls.forward) as double:
        found = calls.times(model, 3)
        counts.append(double.call_count)
    with mock.patch.object(model, "forward", wraps=model.forward) as double:
        found += calls.times(model, 3)
        counts.append(double.call_count)
    return counts, found, calls.times(model)


def another_class(model, calls):
    own = type(model)

    class Other(own):
        def forward(self, x):
            return exchanged(super().forward(x))

        def inner(self, x):
            return super().forward(x)

    model.__class__ = Other
    found = calls.times(model), calls(model.inner)
    model.__class__ = own
    return found, calls.times(model)


def other_layers(model, calls):
    model.head = scaled(model.head, 2)
    found = calls.times(model)
    model.add_module("more", nn.Linear(2, 2))
    model.stem = nn.Sequential(model.stem)  # as adapters wrap layers
    return found, calls.times(model), list(model.state_dict())


def computed_weights(model, calls):
    name = next(name for name, _ in model.deep.named_parameters(recurse=False))
    parametrizations.weight_norm(model.deep, name)
    found = calls.times(model)
    parametrize.remove_parametrizations(model.deep, name)
    prune.l1_unstructured(model.deep, name, 0.5)
    return found, calls.times(model), type(model.deep).__name__


def hooks_of_modules(model, calls):
    """Those of the root are counted: an imitated graph runs inner ones."""
    count = []
    handles = [
        model.register_forward_hook(lambda *_: count.append(1)),
        model.deep.register_forward_hook(lambda *_: None),
    ]
    handles.append(model.head.register_forward_pre_hook(lambda *_: None))
    found = calls.times(model)
    for handle in handles:
        handle.remove()
    return len(count), found, calls.times(model)


def functions_of_torch(model, calls):
    """Replaced for a while, as profilers do."""
    found, forwards = [], [(nn.BatchNorm1d, "forward"), (nn.ReLU, "forward")]
    for place, name in ((F, "batch_norm"), (F, "relu"), (torch, "relu"), *forwards):
        heard, own = [], getattr(place, name)

        def counted(*args, own=own, heard=heard, **kwargs):
            heard.append(1)
            return own(*args, **kwargs) + 1

        with mock.patch.object(place, name, counted):
            found += [calls.times(model), len(heard)]
    return found, calls.times(model)


def moved_and_cast(model, calls):
    device = next(model.parameters()).device
    model.half().float().cpu().to(device, memory_format=torch.contiguous_format).share_memory()
    found = calls.times(model)
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()}, assign=True)
    return found, calls.times(model)


def a_look_at_forward(model, calls):
    forward, cls = model.forward, type(model)
    assert inspect.ismethod(forward) and type(forward) is types.MethodType
    assert forward.__self__ is model and forward.__func__ is cls.forward and forward == model.forward
    assert inspect.isfunction(cls.forward) and type(cls.forward) is types.FunctionType
    assert weakref.WeakMethod(forward)() == forward and pickle.loads(pickle.dumps(cls.forward)) is cls.forward
    member = vars(cls)["forward"]
    texts = [str(inspect.signature(one)) for one in (forward, cls.forward, member)]
    texts += [inspect.getsource(one) for one in (forward, cls.forward, member, cls)]
    texts += [f"{one.__name__} {one.__qualname__} {one.__module__} {one.__doc__}" for one in (forward, member)]
    kinds = [(one.name, one.kind) for one in inspect.classify_class_attrs(cls)]
    return (
        texts,
        inspect.getfullargspec(forward),
        inspect.isfunction(member),
        forward.__code__ is member.__code__,
        kinds,
    )


def a_look_at_the_model(model, calls):
    parts = [(name, type(part), sorted(vars(part))) for name, part in model.named_modules()]
    # What a norm is given by fused layers is a bound method of its own, with replays and without.
    own = [(name, kind, [one for one in names if one != "forward"]) for name, kind, names in parts]
    return own, "forward" in vars(model), dir(model), repr(model), list(model.state_dict())


def compilers(model, calls):
    """Of the model and of others of the same classes."""
    other, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(2, 2)
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), other(x)) and torch.jit.script(other)(x).shape == x.shape
    assert len(list(torch.fx.symbolic_trace(other).graph.nodes)) == 4
    assert torch.export.export(other, (x,)) is not None
    ways = (torch.jit.script, torch.fx.symbolic_trace, lambda one: torch.jit.trace(one, (calls.scene(0),)))
    return [error_of(functools.partial(way, model)) for way in ways], calls.times(model)


def calls_of_forward(model, calls):
    method = functools.partial(model.forward)
    own = functools.partial(type(model).forward, model)
    return calls.times(model.forward), calls.times(method), calls.times(own), calls.times(model)


def around_another(model, calls):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return exchanged(self.body(x))

    outer = Outer()
    return calls.times(outer), calls.times(Outer()), calls.times(model), calls.times(outer)


def errors(model, calls):
    def stop(x):
        raise KeyboardInterrupt

    model.head.forward = stop
    with pytest.raises(KeyboardInterrupt):
        calls(model)
    model.head.forward = lambda x: 1 // 0
    found = [error_of(lambda: calls(model)) for _ in range(3)]
    del model.head.forward
    return found, [error_of(model), error_of(lambda: model(3)), error_of(lambda: model(y=1))], calls.times(model)


def threads(model, calls):
    found = [None] * 4

    def work(n):
        found[n] = [calls(model, 10 * n + k) for k in range(4)]

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


def teacher_and_student(model, calls):
    student, found = copy.deepcopy(model), []
    for _ in range(5):
        x = calls.scene()
        with torch.no_grad():
            wanted = [value.clone() for value in apis.values_of(model(x))]
        student.train()
        sum((a - b).square().sum() for a, b in zip(apis.values_of(student(x)), wanted, strict=True)).backward()
        with torch.no_grad():
            for own, other in zip(model.parameters(), student.parameters(), strict=True):
                other.sub_(other.grad, alpha=1e-4)
                own.mul_(0.9).add_(other, alpha=0.1)
        student.zero_grad()
        found += [calls(student.eval()), wanted]
    return found


def inference_mode(model, calls):
    model.half().float()  # captured in it
    found = []
    for _ in range(2):
        with torch.inference_mode():
            outputs = [apis.values_of(model(calls.scene())) for _ in range(5)]
        found += [[(value.is_inference(), value.tolist()) for value in one] for one in outputs]
        found += calls.times(model)
    return found


def other_parameters(model, calls):
    found = []
    for factor in (1, 2, 3):
        given = {name: value * factor for name, value in model.named_parameters()}
        found += calls.times(lambda x, given=given: torch.func.functional_call(model, given, (x,)), 4)
        found += calls.times(model, 2)
    return found


@torch.no_grad()
def dropped_outputs(model, calls):
    """Nobody waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        return [weakref.ref(apis.values_of(model(calls.scene()))[0])() is None for _ in range(8)]
    finally:
        gc.enable()


def switched(model, calls):
    found = [calls(sparse_bridge.optimize(model))]
    sparse_bridge.restore(model)
    graph_regions.remove()  # as `disable` does
    assert type(vars(type(model))["forward"]) is types.FunctionType
    return found, calls.times(model)
