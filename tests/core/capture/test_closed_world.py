"""Which programs have a closed world, and that guards notice what changes."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch

from sparse_bridge.adapters import protocol
from sparse_bridge.core.closed_world import guards as guards_module
from sparse_bridge.core.closed_world.audit import Audit
from sparse_bridge.core.closed_world.front import FrontAudit
from sparse_bridge.refusals import Refusal, Verdict, Why
from tests.adapters.spconv import apis
from tests.core.capture import closed_programs, closed_settings
from tests.core.capture.apis import scene
from tests.core.capture.closed_programs import CASES

CLOSED = {name: changes for name, (_, changes) in CASES.items() if changes is not None}
OPEN = [name for name, (_, changes) in CASES.items() if changes is None]


@pytest.fixture(scope="module")
def sp():
    with apis.standin() as module:
        yield module


@contextlib.contextmanager
def unchanged():
    """What the programs' changes do outside of their models is undone."""
    places = [vars(closed_programs), vars(closed_settings), vars(torch.nn.functional)]
    values = [dict(place) for place in places]
    # By name: a module's `__builtins__` is a dictionary too, and some of what it may hold has no copy.
    inner = {name: copy.deepcopy(values[0][name]) for name in ("SEEN", "TABLE", "CELL", "DECORATED")}
    owners = [*values[0].values(), *(cls for cls, _ in CASES.values()), closed_settings.Options]
    classes = {one for one in owners if isinstance(one, type) and one.__module__.startswith("tests.")}
    attributes = [(cls, dict(vars(cls))) for cls in classes]
    limits, noted = dict(vars(closed_programs.LIMITS)), dict(vars(closed_programs.note))
    widened, bases, switch = (
        closed_programs.widened,
        closed_programs.CallsToo.__bases__,
        torch.backends.cudnn.benchmark,
    )
    code, defaults = widened.__code__, widened.__defaults__
    by_name, gradients = dict(closed_programs.narrowed.__kwdefaults__), torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(gradients)
    closed_programs.narrowed.__kwdefaults__ = by_name
    widened.__code__, widened.__defaults__ = code, defaults
    closed_programs.CallsToo.__bases__, torch.backends.cudnn.benchmark = bases, switch
    for place, value in zip(places, values, strict=True):
        place.clear()
        place.update(value)
    for name, value in inner.items():
        kept = values[0][name]
        kept.clear()
        kept.extend(value) if isinstance(kept, list) else kept.update(value)
    for cls, known in attributes:
        for name in vars(cls).keys() - known:
            delattr(cls, name)
        for name, value in known.items():
            if vars(cls).get(name) is not value and not name.startswith("__"):
                setattr(cls, name, value)
    vars(closed_programs.LIMITS).update(limits)
    vars(closed_programs.note).update(noted)
    closed_programs.scaled.__defaults__[0][:] = [1.0]


@pytest.fixture
def restored():
    with unchanged():
        yield


def audited(model, sp, seed=1):
    """The audit of a model's call."""
    x = scene(sp, "spconv", seed, "cpu")
    with Audit(model, protocol.made_by(type(x))) as audit:
        model(x)
    return audit


def watched(sp, name, train=False):
    """(a program, the audit of its call)."""
    torch.manual_seed(0)
    model = CASES[name][0](sp).train(train)
    return model, audited(model, sp)


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.filterwarnings("ignore:.*")
def test_an_open_world_is_refused_with_the_place(sp, restored, name, capsys):
    _, audit = watched(sp, name)
    with pytest.raises(Refusal) as refusal:
        audit.guards()
    assert refusal.value.verdict is not Verdict.FINAL  # another call may not do it
    text = str(refusal.value)
    assert "closed_programs.py:" in text or "closed_settings.py:" in text or CASES[name][0].__name__ in text


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_world_holds_until_something_changes(sp, restored, name, train):
    model, audit = watched(sp, name, train)
    guards = audit.guards()
    assert guards.hold(), guards.changed()
    model(scene(sp, "spconv", 2, "cpu"))
    assert guards.hold(), guards.changed()
    assert guards.changed() == ""


CHANGES = [(name, number) for name, changes in CLOSED.items() for number in range(len(changes))]


@pytest.mark.parametrize(("name", "number"), CHANGES)
def test_guards_notice_a_change(sp, restored, name, number):
    model, audit = watched(sp, name, train=True)
    guards = audit.guards()
    CLOSED[name][number](model)
    assert not guards.hold()
    assert guards.changed()


@pytest.mark.parametrize("name", closed_programs.WRITERS)
def test_guards_notice_what_a_call_writes(sp, restored, name):
    """The call behind the one that is watched is eager, and guards are asked before a capture."""
    model = closed_programs.WRITERS[name](sp)
    guards = audited(model, sp).guards()
    assert guards.hold(), guards.changed()
    model(scene(sp, "spconv", 2, "cpu"))
    assert not guards.hold()


def test_equal_numbers_of_other_types_are_a_change(sp):
    """It is said in the program's own names."""
    model, audit = watched(sp, "attribute")
    guards = audit.guards()
    model.scale = float("1.0")  # another object
    assert guards.hold()
    for value in (0.5, 1, True, "1.0", None):
        model.scale = value
        assert not guards.hold() and guards.changed() == f"attribute.scale: {value!r}, was 1.0"
    model.scale = 1.0
    assert guards.hold()


@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ((1,), (True,)), ("a", b"a")])
def test_values_that_compute_otherwise_are_not_equal(value, other):
    assert not guards_module.equal(value, other)
    assert guards_module.equal(value, copy.copy(value)) and guards_module.equal(float("nan"), float("nan"))


def test_what_a_model_does_not_read_may_change(sp):
    model, audit = watched(sp, "attributes that it does not read")
    guards = audit.guards()
    model.epoch, model.other = 1, 2
    assert guards.hold()


@pytest.mark.parametrize("name", ["cached attribute that is not there yet", "cached property"])
def test_what_was_made_in_the_first_call_is_there_in_the_second(sp, name):
    model, _ = watched(sp, name)
    guards = audited(model, sp, 2).guards()
    assert guards.hold()
    model.__dict__["width" if "width" in model.__dict__ else "factor"] = 5.0
    assert not guards.hold()


class Begins(closed_programs.Net):
    """Chooses and prints on the way to its sparse layers, or behind them."""

    def forward(self, x, behind=False):
        if not behind:
            print("rows", "many" if x.features.shape[0] > 10 else "few")
        self.audit.__enter__()
        x = self.b(self.a(x))
        if behind:
            print("rows")
        return x


@pytest.mark.parametrize("behind", [False, True])
def test_what_comes_before_the_point_of_resumption_does_not_count(sp, behind):
    model, x = Begins(sp), scene(sp, "spconv", 1, "cpu")
    model.audit = audit = Audit(model, protocol.made_by(type(x)))
    model(x, behind)
    audit.__exit__()
    if behind:
        with pytest.raises(Refusal, match=r"calls print \(test_closed_world.py:\d+\)"):
            audit.guards()
    else:
        assert audit.guards().hold()


class AllVariables(closed_programs.Net):
    """Reads its variables by names that are not in sight."""

    def forward(self, x, way):
        factor = 2.0
        x = self.b(self.a(x))
        own = {"locals": locals, "vars": vars, "dir": dir}
        if way == "locals":
            factor = locals()["factor"]
        elif way == "vars":
            factor = vars()["factor"]
        elif way == "eval":
            factor = eval("factor")
        elif way == "exec":
            exec("factor = 3.0")
        elif way == "frame":
            factor = sys._getframe(0).f_locals["factor"]
        return closed_programs.times(x, factor * len(own))


@pytest.mark.parametrize("way", ["locals", "vars", "eval", "exec", "frame"])
def test_variables_that_are_read_by_other_names(sp, way):
    model, x = AllVariables(sp), scene(sp, "spconv", 1, "cpu")
    with Audit(model, protocol.made_by(type(x))) as audit:
        model(x, way)
    with pytest.raises(Refusal, match=r"\(test_closed_world.py:\d+\)"):
        audit.guards()


class Fronted(closed_programs.Net):
    """Comes to its sparse layers with the audit of what is in front of them."""

    def forward(self, x, front):
        front()
        self.audit.stop(sys._getframe(0))
        print("behind")
        return self.b(self.a(x))


def looks():
    return time.perf_counter(), os.environ.get("NO_SUCH_NAME"), int(torch.ones(2).sum()), [1].append(2)


def draws_from_a_generator():
    return DRAWS.rand()


DRAWS, NOTED = np.random.RandomState(0), set()
EFFECTS = [
    lambda: print("front"),
    lambda: NOTED.add(1),
    lambda: random.random(),
    lambda: np.random.rand(),
    draws_from_a_generator,
    lambda: warnings.warn("front", stacklevel=1),
    lambda: torch.manual_seed(0),
]


@pytest.mark.parametrize("front", [*EFFECTS, looks, lambda: None])
@pytest.mark.filterwarnings("ignore:front")
def test_what_may_run_twice_in_front_of_sparse_layers(sp, front):
    model, x = Fronted(sp), scene(sp, "spconv", 1, "cpu")
    model.audit = FrontAudit(model, protocol.made_by(type(x)))
    with torch.random.fork_rng(), model.audit:
        model(x, front)
    assert sys.getprofile() is None
    if front in EFFECTS:
        with pytest.raises(Refusal, match=r"GRAPH_SIDE_EFFECT|GRAPH_WRITES_STATE"):
            model.audit.refuse_effects()
    else:
        model.audit.refuse_effects()


def test_somebody_else_s_profiler_stays(sp):
    def profiler(frame, event, argument):
        pass

    sys.setprofile(profiler)
    try:
        _, audit = watched(sp, "plain")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    with pytest.raises(Refusal) as refusal:
        audit.guards()
    assert refusal.value.why is Why.GRAPH_PROFILED
    assert refusal.value.verdict is Verdict.UNDECIDED


def test_nothing_is_left_after_an_error(sp):
    model = CASES["plain"][0](sp)
    with pytest.raises(AttributeError), Audit(model, protocol.made_by(sp.SparseConvTensor)):
        model(None)
    assert sys.getprofile() is None
    assert not {"__bool__", "__float__", "__int__", "__index__"} & set(vars(torch.Tensor))


@pytest.mark.parametrize("edited", [False, True])
def test_code_without_its_source_is_refused(sp, tmp_path, edited):
    """Typed in, or from a file that is another one by now."""
    path = tmp_path / "program.py"
    text = "class Typed(Net):\n    def end(self, x):\n        return times(x, self.scale)\n"
    path.write_text(text)
    names = {"Net": closed_programs.Net, "times": closed_programs.times, "__name__": "program"}
    exec(compile(text, str(path) if edited else "<string>", "exec"), names)
    path.write_text(text.replace("self.scale", "self.other_scale"))
    with pytest.raises(Refusal, match="GRAPH_NO_SOURCE"):
        audited(names["Typed"](sp), sp).guards()


def test_large_tables_are_refused(sp):
    model = CASES["list in a dictionary"][0](sp)
    model.config["w"] = [float(n) for n in range(100000)]
    with pytest.raises(Refusal, match=r"list in a dictionary\.config.*4096 values"):
        audited(model, sp).guards()


def test_a_reference_is_kept_of_modules_alone(sp):
    """An audit does not hold on to what the call computed."""
    model, audit = watched(sp, "plain")
    assert isinstance(model, torch.nn.Module)
    held = [value for value in vars(audit._watch).values() if isinstance(value, (torch.Tensor, types.FrameType))]
    assert not held
