"""Convolutions in a row by the compiled helper: the launches that Python makes one by one."""

from __future__ import annotations

import contextlib
import gc
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge import settings
from sparse_bridge.core.compile.programs.conv_step import ChainStep, ConvStep, Link
from sparse_bridge.core.conv import choice, registry
from sparse_bridge.core.conv.dataflows import masked
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.kernels.runtime.triton_compat import HOOKS
from sparse_bridge.native import calls as native_calls
from tests.adapters.spconv import doors as spconv_doors
from tests.native.chains import Bench, by_table
from tests.native.recording import Recorder, anew, helper, served, values_of
from tests.native.world import World
from tests.walk_doors import pretended_gpu

OPERANDS = 9  # x, w, six of the epilogue, y
WIDTH = 16


class Launches(Recorder):
    """Every launch as it comes: (kernel, grid, values)."""

    def __init__(self):
        super().__init__()
        self.all = []

    def _launched(self, launch):
        name, kinds = self._names[launch.function - 1]
        code = self.before(name)
        if not code:
            self.all.append((name, launch.grid, values_of(launch, kinds)))
        return code


@contextlib.contextmanager
def bench():
    helper()
    recorder = Launches()
    with anew(), recorder.recording(), spconv_doors.standin() as sp, torch.no_grad():
        world = World(sp, recorder, True)
        with pretended_gpu():
            world(3)  # kernels are compiled, so to speak
            yield Bench(world), recorder


def sourced(launches):
    """Launches with "result of launch i" in the place of addresses that launch i wrote last."""
    written, told = {}, []
    for number, (name, grid, values) in enumerate(launches):
        *operands, y = values[:OPERANDS]
        absent = [at == y for at in operands]
        read = [None if gone else written.get(at, at) for at, gone in zip(operands, absent, strict=True)]
        told.append((name, grid, read, values[OPERANDS:]))
        written[y] = f"result {number}"
    return told


@pytest.mark.parametrize("seed", range(12))
def test_the_launches_are_those_of_its_steps(seed):
    with bench() as (made, recorder):
        chain, args, links = made.chain(seed)
        runs, done = [], []
        for used in (False, False, True, True):
            recorder.all.clear()
            with contextlib.ExitStack() as stack:
                if not used:
                    stack.enter_context(mock.patch.object(native_calls, "planned", None))
                    stack.enter_context(mock.patch.object(ChainStep, "_join"))
                by_helper = stack.enter_context(served())
                results = chain(*args)
            done.append(by_helper["planned"])
            assert [tuple(y.shape) for y in results] == [tuple(made.x.shape)] * len(results)
            assert len(results) == sum(link.last < 0 for link in links)
            runs.append(list(recorder.all))
        assert [bool(run) for _, run in chain._runs] == [True]
        assert len(runs[0]) == len(links)
        want = sourced(runs[1])
        assert sourced(runs[2]) == want  # by steps, which makes the chain
        assert done == [0, 0, len(links), 0]
        assert sourced(runs[3]) == want  # by the chain


@pytest.mark.parametrize("seed", range(12))
def test_no_result_is_overwritten_that_is_read_later(seed):
    with bench() as (made, recorder):
        chain, args, links = made.chain(seed, 40, 0.1)
        for _ in range(3):
            recorder.all.clear()
            chain(*args)
        assert chain._runs[0][1] is not None
        size = made.x.numel() * made.x.element_size()
        starts = [values[OPERANDS - 1] for _, _, values in recorder.all]
        ends = [len(links) if link.last < 0 else link.last for link in links]
        for one, start in enumerate(starts):
            for other in range(one + 1, ends[one] + 1):
                if other < len(links):
                    assert abs(starts[other] - start) >= size, (one, other)
        most = max(sum(one <= at <= ends[one] for one in range(len(links))) for at in range(len(links)))
        within = {start for start, link in zip(starts, links, strict=True) if link.last >= 0}
        assert len(within) <= most  # memory is used again


@pytest.mark.parametrize("seed", range(6))
def test_results_of_other_sizes_have_room(seed):
    """Between those that are read later, too."""
    with bench() as (made, recorder):
        chain, args, links = made.widths(seed)
        for _ in range(3):
            recorder.all.clear()
            chain(*args)
        assert chain._runs[0][1] is not None and len(recorder.all) == len(links)
        rows, itemsize = made.x.shape[0], made.x.element_size()
        sizes = [rows * weight.shape[-1] * itemsize for weight in args[1:]]
        starts = [values[OPERANDS - 1] for _, _, values in recorder.all]
        ends = [len(links) if link.last < 0 else link.last for link in links]
        assert len(set(sizes)) > 2
        for one in range(len(links)):
            for other in range(one + 1, min(ends[one] + 1, len(links))):
                first, second = sorted((one, other), key=starts.__getitem__)
                assert starts[first] + sizes[first] <= starts[second], (one, other)


def test_the_collector_sees_what_a_chain_holds():
    with bench() as (made, _):
        chain, args, links = made.chain(1)
        for _ in range(3):
            chain(*args)
        held = set(map(id, gc.get_referents(chain._runs[0][1])))
        for link in links:
            plan = link.step.plan
            assert id(plan) in held
            assert id(plan._plan.forward) in set(map(id, gc.get_referents(plan.native)))


def test_other_settings_are_python_s():
    with bench() as (made, recorder):
        chain, args, links = made.chain(3)
        for _ in range(3):
            chain(*args)
        run, values = chain._runs[0][1], [*args, *[None] * len(links)]
        recorder.all.clear()
        assert run(list(values)) is None and len(recorder.all) == len(links)
        recorder.all.clear()
        with settings.override(tune="off"):
            assert run(list(values)) is NotImplemented and not recorder.all


def test_what_it_refuses_python_does():
    with bench() as (made, recorder):
        chain, args, links = made.chain(3)
        for _ in range(3):
            chain(*args)
        run = chain._runs[0][1]
        values = [*args, *[None] * len(links)]

        def refused(**given):
            recorder.all.clear()
            answer = run([*[given.get(str(at), one) for at, one in enumerate(values)]])
            return answer is NotImplemented and not recorder.all

        for other in (made.x.double(), made.x[:-1], made.x[:, :8], made.x.t().contiguous().t(), None):
            assert refused(**{"0": other})
        assert refused(**{"1": None}) and refused(**{"4": args[4].clone()})
        with mock.patch.object(torch._C, "_cuda_getDevice", lambda: 1):
            assert refused()
        hook = type("Hook", (), {"calls": (print,)})()
        with mock.patch.object(HOOKS, "launch_enter_hook", hook, create=True):
            assert refused()
        with torch.autocast("cpu", torch.bfloat16):
            assert refused()
        helper().refuse(1.0)
        try:
            assert refused()
        finally:
            helper().refuse(0.0)
        assert not refused()
        for wrong in ((), ([],), (values, 1), (tuple(values),)):
            with pytest.raises(TypeError, match="list of its values"):
                run(*wrong)


@pytest.mark.parametrize("seed", range(3))
def test_refusals_at_random(seed):
    """A refused chain has launched nothing; its steps do the same."""
    with bench() as (made, recorder):
        chain, args, _ = made.chain(seed)
        for _ in range(3):
            recorder.all.clear()
            chain(*args)
        want, by_steps = sourced(recorder.all), []
        own = ChainStep._join
        counting = mock.patch.object(ChainStep, "_join", lambda step: (by_steps.append(step), own(step)))
        helper().refuse(0.003, seed)
        try:
            with counting:
                for _ in range(60):
                    recorder.all.clear()
                    chain(*args)
                    assert sourced(recorder.all) == want
        finally:
            helper().refuse(0.0)
        assert 5 < len(by_steps) < 60


def test_layers_on_two_gpus_are_not_launched_in_a_row():
    """A launch goes to the GPU that is current."""
    with bench() as (made, recorder):
        chain, args, links = made.chain(5)
        chain(*args)
        forward = [link.step.plan._plan.forward for link in links]
        later = [one for one in forward if not any(spec.native for spec in one._specs.values())]
        for spec in later[-1]._specs.values():
            spec.device = torch.device("cpu", 1)
        for _ in range(2):
            chain(*args)
        run = chain._runs[0][1]
        assert all(spec.native for spec in later[-1]._specs.values())
        recorder.all.clear()
        assert run([*args, *[None] * len(links)]) is NotImplemented and not recorder.all


def test_a_failure_of_the_driver_is_raised():
    with bench() as (made, recorder):
        chain, args, _ = made.chain(5)
        for _ in range(3):
            chain(*args)
        left = [4]

        def before(name):
            left[0] -= 1
            return 700 if left[0] == 0 else 0

        recorder.before = before
        with pytest.raises(RuntimeError, match="error 700"):
            chain(*args)
        assert len(chain(*args)) > 0


def test_chains_that_do_not_fit_are_refused():
    made = helper()
    with bench() as (it, _):
        chain, args, links = it.chain(1, 2)
        for _ in range(3):
            chain(*args)
        plan = links[0].step.plan
        step = (plan, WIDTH, 0, -1, 1, 0, 2, 3, -1, -1, -1, -1, -1)
        assert made.Chain((step,), 8, 4)
        for wrong in (
            ((), 8, 4),
            ((step,), 8, 0),
            ((step,), 0, 4),
            ((step,) * 300, 8, 4),
            (((None, *step[1:]),), 8, 4),
            (((*step[:5], 8, *step[6:]),), 8, 4),
            (((*step[:4], 9, *step[5:]),), 8, 4),
        ):
            with pytest.raises(ValueError, match="chain"):
                made.Chain(*wrong)


def test_weights_that_kernels_read_as_copies():
    """As TF32 on Hopper does: the address is the copy's, which lives until all has been queued."""
    with bench() as (made, recorder):
        chain, args, links = made.chain(5)
        for _ in range(3):
            chain(*args)
        products = {link.step.plan._plan.forward for link in links}
        copies = []

        class Copied:
            def rows_of(self, weight):
                copies.append(weight.clone())
                return copies[-1]

        for product in products:
            product._copied = Copied()
        try:
            recorder.all.clear()
            assert chain._runs[0][1]([*args, *[None] * len(links)]) is None
        finally:
            for product in products:
                product._copied = None
        read = [values[1] for _, _, values in recorder.all]
        assert read == [copy.data_ptr() for copy in copies] and len(copies) == len(links)


class Heard:
    """What hears which views of a map are asked for."""

    def __init__(self):
        self.asked = []

    def on_view(self, side, tiles):
        self.asked.append((side, tiles))


class Unordered:
    """A chain of a layer over a map that nobody has ordered, a new one in every call, and of one
    that follows it."""

    def __init__(self, made, recorder, volume, channels, **more):
        self.recorder = recorder
        n_rows, width = made.x.shape
        self.map = lambda: by_table(n_rows, volume**3, **more)
        weights = [torch.randn(width, *[volume] * 3, channels), torch.randn(width, 3, 3, 3, width)]
        self.args = [torch.randn(n_rows, channels), None, weights[0], made.kmap, weights[1]]
        form, nothing = ConvForm("ovi"), (-1,) * 5
        steps = [ConvStep(form, False, 0.0, None, 0.0) for _ in range(2)]
        links = [Link(steps[0], (0, 2, -1, 1, *nothing), 1), Link(steps[1], (5, 4, -1, 3, *nothing), -1)]
        self.chain = ChainStep(links, len(self.args), 4)

    def run(self, trained=False):
        """(launches of products, which views were asked for, how many of its steps ran apart)."""
        self.args[1] = kmap = self.map()
        kmap.rulebook.trained = trained
        kmap.rulebook.observe(heard := Heard())
        self.recorder.all.clear()
        with served() as by_helper:
            self.chain(*self.args)
        table = kmap.rulebook._tables[int(kmap.flipped)]
        at = None if table is None else table.nbr.data_ptr()
        launches = [
            (name, grid, ["table" if one == at else one for one in values[OPERANDS:]])
            for name, grid, values in self.recorder.all
            if "gemm" in name
        ]
        return launches, set(heard.asked), by_helper["planned"]


@pytest.mark.parametrize("kind", ["few offsets", "narrow", "a stem", "trained", "many rows", "backwards"])
def test_maps_without_tiles(kind, monkeypatch):
    """What the rules leave unordered is bound over the table; the rest is Python's."""
    if kind == "many rows":
        monkeypatch.setattr(masked, "unordered_rows", lambda product: (0, 0, 0))
        monkeypatch.setattr(choice, "unordered_rows", lambda product: (0, 0, 0))
    with bench() as (made, recorder):
        monkeypatch.setattr(registry, "choose", lambda case, wanted="": masked.BY_RULE)
        stem, narrow = kind == "a stem", kind in ("a stem", "narrow")
        scene = Unordered(made, recorder, 5 if stem else 2, 4 if narrow else 16, symmetric=stem)
        if kind == "backwards":
            own = scene.map
            scene.map = lambda: own().transposed()
        runs = [scene.run(kind == "trained") for _ in range(5)]
        by_chain = kind not in ("trained", "many rows")
        assert [apart for *_, apart in runs[2:]] == [0 if by_chain else 2] * 3
        first, *_ = runs[0][0]
        assert first[0] == ("narrow_gemm" if narrow else "gather_gemm")
        assert ("table" in first[2]) == by_chain
        if by_chain:  # what has been ordered lies elsewhere every time
            assert all(run[:2] == runs[0][:2] for run in runs[1:])
        else:
            assert all(run[1] == runs[0][1] for run in runs[1:])


def test_a_link_that_is_refused_again_and_again_is_left_out(monkeypatch):
    """The others stay a chain; a new plan gets another chance."""
    with bench() as (made, recorder):
        monkeypatch.setattr(registry, "choose", lambda case, wanted="": masked.BY_RULE)
        scene = Unordered(made, recorder, 2, 16)
        form, nothing = ConvForm("ovi"), (-1,) * 5
        more = [ConvStep(form, False, 0.0, None, 0.0) for _ in range(2)]
        first, second = scene.chain._links
        links = [
            first,
            second._replace(last=2),
            Link(more[0], (6, 4, -1, 3, *nothing), 3),
            Link(more[1], (7, 4, -1, 3, *nothing), -1),
        ]
        scene.chain = ChainStep(links, len(scene.args), 4)
        apart = [scene.run(trained=True)[2] for _ in range(24)]
        assert apart[-1] == 1 and 4 in apart
        assert [(list(at), bool(run)) for at, run in scene.chain._runs] == [([0], False), ([1, 2, 3], True)]
        links[0].step.plan = None
        assert [scene.run()[2] for _ in range(4)][-1] == 0
        assert [list(at) for at, _ in scene.chain._runs] == [[0, 1, 2, 3]]


def test_scenes_of_ever_new_sizes_leave_no_link_out(monkeypatch):
    """A size that a plan has not met is Python's once; nobody is to blame for that."""
    with bench() as (_, recorder):
        monkeypatch.setattr(registry, "choose", lambda case, wanted="": masked.BY_RULE)
        form, nothing = ConvForm("ovi"), (-1,) * 5
        weights = [torch.randn(16, 2, 2, 2, 16) for _ in range(2)]
        steps = [ConvStep(form, False, 0.0, None, 0.0) for _ in range(2)]
        links = [Link(steps[0], (0, 2, -1, 1, *nothing), 1), Link(steps[1], (4, 3, -1, 1, *nothing), -1)]
        chain, apart = ChainStep(links, 4, 4), []
        for n_rows in [*range(70, 70 + 64 * 40, 64)] * 2:
            recorder.all.clear()
            with served() as by_helper:
                chain(torch.randn(n_rows, 16), by_table(n_rows, 8), *weights)
            apart.append(by_helper["planned"])
        assert sum(apart[3:40]) > 2 * 16  # each size once
        assert apart[40:] == [0] * 40
        assert [bool(run) for _, run in chain._runs] == [True]
