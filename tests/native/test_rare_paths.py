"""Ways through the helper that no event takes: what fails, and what other releases have."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge import settings
from sparse_bridge.core.conv.history import histories
from sparse_bridge.kernels.gemm import wgrad_gemm
from sparse_bridge.native import calls as native_calls
from tests.adapters.spconv import apis as spconv_apis
from tests.host_time import pairs
from tests.native import test_training as training
from tests.native.recording import Recorder, anew, served, way
from tests.native.test_memory import world
from tests.walk_apis import _KERNELS, pretended_gpu


def plan_of(it, layer):
    history = histories[id(layer)][1]
    return history.plan or history.full_plan


def launched(it, times=1):
    """How often the helper called a layer of the network."""
    with served() as by_helper:
        for _ in range(times):
            it.net(it.x)
    return by_helper["known_call"]


def test_settings_that_cannot_be_asked_are_pythons_matter(monkeypatch):
    def fails():
        raise ValueError("no settings")

    with world() as it:
        x, weight = it.features, it.net.conv1.weight
        for broken in (fails, object):
            with monkeypatch.context() as patch:
                patch.setattr(settings, "generation", settings.generation + 1)
                patch.setattr(settings, "get", broken)
                assert native_calls.run_plain(x, weight, None, it.x.indice_dict["a"]._map, None) is NotImplemented
        assert launched(it) == 4


def test_numbers_that_fit_no_kernel_are_raised():
    with world() as it:
        entries = it.book.cache._entries
        plan = plan_of(it, it.net.conv1)
        product = plan._plan.forward
        launch = product._bind(it.book, 0, (it.features, it.net.conv1.weight, plan.read))
        launch._numbers = ("no number", *launch._numbers[1:])
        entries.clear()
        entries[product._key] = launch
        with pytest.raises(AttributeError, match="data_ptr"):  # as Python's launch raises
            it.net.conv1(it.x)
        entries.clear()
        assert launched(it) == 4


def test_a_launch_that_is_like_another_layers_is_pythons():
    """What a spec was launched with last is compared with the operands."""
    with world() as it:
        plan, other = plan_of(it, it.net.conv1), plan_of(it, it.net.conv4)
        bound = next(spec.native for spec in other._plan.forward._specs.values() if spec.native is not None)
        specs = [spec for spec in plan._plan.forward._specs.values() if spec.native is not None]
        kept = [spec.native for spec in specs]
        plan.native = native_calls.known(plan, plan._plan.forward)  # which remembers no launch
        for spec in specs:
            spec.native = bound
        it.book.cache._entries.clear()
        assert launched(it) == 4
        for spec, native in zip(specs, kept, strict=True):
            assert spec.native is not bound or native is bound  # Python's launch took its place
        assert launched(it) == 4


def test_parts_of_a_plan_that_are_none():
    with world() as it:
        known = type(plan_of(it, it.net.conv1).native)
        with pytest.raises(TypeError, match=r"Known takes \d+ values, got 0") as refused:
            known()
        count = int(re.search(r"\d+", str(refused.value))[0])
        numbers = 0, 1, False, 0, 0, 0, 0
        with pytest.raises(TypeError, match="parts of a FusedPlan"):
            known(*[None] * (count - len(numbers)), *numbers)
        with pytest.raises(TypeError):
            known(*[None] * count)


class Asked:
    """Compiled variants, and those that were asked for."""

    def __init__(self, entries):
        self.entries, self.seen = entries, {}

    def get(self, key, default=None):
        self.seen[key] = self.entries.get(key)
        return self.seen[key]


def test_gradients_that_fit_no_output_are_pythons(monkeypatch):
    """Kernels would read behind their ends."""
    own, seen = native_calls.gradients, []
    with anew(), way("on"), spconv_apis.standin() as sp:
        it = training.World(sp, Recorder(), True)
        with pretended_gpu(), pairs():
            for _ in range(4):
                it.step()
            monkeypatch.setattr(native_calls, "gradients", lambda *given: seen.append(given) or own(*given))
            it.step()
            plan, kmap, x, weight, dy, *rest = seen[0]
            assert isinstance(own(*seen[0]), tuple)
            for wrong in (dy[1:], torch.cat([dy, dy]), dy.double(), dy.t().contiguous().t()):
                assert own(plan, kmap, x, weight, wrong, *rest) is NotImplemented
                assert own(plan, kmap, wrong[:, : x.shape[1]], weight, dy, *rest) is NotImplemented


def test_kernels_in_a_dictionary_and_values_that_fit_none(monkeypatch):
    """Tests keep compiled kernels in something else, in which there is every variant."""
    own, seen, by_python = native_calls.gradients, [], []
    launch = wgrad_gemm.WgradGemm.__call__
    monkeypatch.setattr(native_calls, "gradients", lambda *given: seen.append(given) or own(*given))
    monkeypatch.setattr(wgrad_gemm.WgradGemm, "__call__", lambda *given: by_python.append(1) or launch(*given))
    with anew(), way("on"), spconv_apis.standin() as sp:
        it = training.World(sp, Recorder(), True)
        with pretended_gpu(), pairs():
            asked = {kernel: Asked(kernel._compiled) for kernel in _KERNELS}
            for kernel, entries in asked.items():
                kernel._compiled = entries
            for _ in range(5):
                it.step()
            for kernel, entries in asked.items():
                kernel._compiled = entries.seen
            seen.clear(), by_python.clear()
            it.step()
            assert seen and not by_python, "the helper launches what is in a dictionary"
            _, kmap, *_, dtype = seen[-1]
            assert dtype is not None and isinstance(own(*seen[-1]), tuple)
            for one in kmap.rulebook.cache._entries.values():
                if type(one) is wgrad_gemm.WgradGemm:
                    one._pairs_at = ("no number", *one._pairs_at[1:])
            with pytest.raises(AttributeError, match="data_ptr"):
                own(*seen[-1])
