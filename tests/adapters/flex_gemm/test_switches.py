"""Every switch has an effect, is checked, or is said to have no meaning."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm import options
from sparse_bridge.adapters.flex_gemm.errors import ArgumentValueError
from tests.quick import quick

from .test_convolutions import voxels, weights

PAGE = Path(__file__).parents[3] / "docs" / "flex_gemm.md"
ROOT = PAGE.parents[1]
# Environment variables of FlexGEMM's releases, and of their builds.
VARIABLES = (
    "FLEX_GEMM_USE_AUTOTUNE_CACHE",
    "FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE",
    "FLEX_GEMM_AUTOTUNE_CACHE_PATH",
    "FLEX_GEMM_AUTOTUNER_VERBOSE",
    "FLEX_GEMM_BUILD_CUDA",
    "FLEX_GEMM_USE_AUTOTUNE_RUNTIME",
    "FLEX_GEMM_AUTOTUNE_MODE",
    "FLEX_GEMM_AUTOTUNE_STORE_META",
    "BUILD_TARGET",
    "GPU_ARCHS",
)


@pytest.fixture(autouse=True)
def disabled():
    sparse_bridge.disable()
    yield
    sparse_bridge.disable()


def modules():
    """The stand-in of the generation in force, with all below it."""
    package = importlib.import_module("flex_gemm")
    found = [package]
    for info in pkgutil.walk_packages(package.__path__, "flex_gemm.", onerror=lambda _: None):
        try:
            found.append(importlib.import_module(info.name))
        except ImportError:  # of the other generation
            continue
    return found


def switches():
    """(module, name) of everything that can be assigned: values of modules."""
    for module in modules():
        for name, value in vars(module).items():
            if not (name.startswith("_") or isinstance(value, types.ModuleType) or callable(value)):
                yield module, name


def shown(module, name):
    return ".".join([*module.__name__.split(".")[1:], name])


def table():
    """What the page says: "effect", "checked" or "no meaning", by switch."""
    text = PAGE.read_text(encoding="utf-8")
    rows = text[text.index("## Switches") :].split("\n\n")[2].splitlines()[2:]
    found = {}
    for row in rows:
        names, _, here = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = here.partition(":")[0]
    return found


def test_every_switch_is_on_the_page():
    said = table()
    assert set(said.values()) == {"effect", "checked", "no meaning"}
    assert set(VARIABLES) <= set(said)
    held = set()
    for profile in ("1", "2.0"):
        with sparse_bridge.enable("flex_gemm", mode="standin", profile=profile):
            held |= {shown(*switch) for switch in switches()}
    assert len(held) > 15
    assert held <= set(said), held - set(said)
    named = {name for name in said if name.isidentifier() or "." in name} - set(VARIABLES)
    assert {name for name in named if not name.startswith("set_")} == held


class Answers:
    """What functions of a generation compute, and a gradient."""

    def __init__(self, profile):
        self.profile = profile
        self.feats, self.coords, self.shape = voxels(60, 3, seed=2)
        self.weight, self.bias = weights(3, 4, (3, 3, 3)), torch.randn(4)

    def __call__(self):
        feats = self.feats.clone().requires_grad_()
        if self.profile == "1":
            from flex_gemm.ops.grid_sample import grid_sample_3d
            from flex_gemm.ops.spconv import sparse_conv3d, sparse_submanifold_conv3d

            given = feats, self.coords, self.shape, self.weight, self.bias
            y, _ = sparse_submanifold_conv3d(*given)
            z, places, _ = sparse_conv3d(*given, stride=(2, 2, 2))
            points = torch.rand(self.shape[0], 9, 3, generator=torch.Generator().manual_seed(0))
            found = [y, z, places, grid_sample_3d(feats, self.coords, self.shape, points * 5)]
        else:
            from flex_gemm.ops import sparse_conv, submanifold_conv

            last = (self.shape[0], *self.shape[2:], 3)
            y, _ = submanifold_conv(feats, self.coords, last, self.weight, self.bias)
            z, places, *_ = sparse_conv(feats, self.coords, last, self.weight, stride=2)
            found = [y, z, places]
        (y.sum() + z.square().sum()).backward()
        return [*found, feats.grad]


@pytest.mark.parametrize("profile", ("1", "2.0"))
def test_what_has_no_meaning_changes_nothing(profile, rules, monkeypatch):
    said = table()
    with sparse_bridge.enable("flex_gemm", mode="standin", profile=profile):
        answers = Answers(profile)
        want, seen = answers(), 0
        for module, name in list(switches()):
            kind = said[shown(module, name)]
            if kind == "effect" and "ALLOW_TF32" not in name.upper():
                continue
            now = getattr(module, name)
            others = {
                "ALGORITHM": options.ALGORITHMS,
                "OUT_COORD_ALGO": (0, 1, 1.0),
                "allow_tf32": (None,),
                "SPCONV_ALLOW_TF32": (None,),
                "AUTOTUNE_MODE": ("never", 3),
            }.get(name, (not now, 0, 1e-9, "any", None, [3]))
            for value in others:
                monkeypatch.setattr(module, name, value)
                for got, expected in zip(answers(), want, strict=True):
                    assert torch.equal(got, expected), (name, value)
                seen += 1
            monkeypatch.setattr(module, name, now)
        for call in ("set_hashmap_ratio",):
            for module in modules():
                if hasattr(module, call) and hasattr(module, "HASHMAP_RATIO"):
                    if profile == "1":
                        getattr(module, call)(0.5)
                    else:
                        with pytest.warns(DeprecationWarning):
                            getattr(module, call)(0.5)
                    assert module.HASHMAP_RATIO == 0.5
                    rules.set(module, HASHMAP_RATIO=2.0)
        assert seen > 10


@pytest.mark.parametrize("profile", ("1", "2.0"))
def test_what_is_checked_is_refused(profile, monkeypatch):
    with sparse_bridge.enable("flex_gemm", mode="standin", profile=profile):
        answers, spconv = Answers(profile), importlib.import_module("flex_gemm.ops.spconv")
        wrong = {"ALGORITHM": ("fastest", 3)}
        if profile == "1":
            wrong |= {"OUT_COORD_ALGO": (2, -1, "hash"), "SERIALIZATION_MODE": (3, "z_order", 0.5)}
        for name, values in wrong.items():
            for value in values:
                with monkeypatch.context() as assigned:
                    assigned.setattr(spconv, name, value)
                    with pytest.raises(ArgumentValueError, match=rf"{name} is '?{value}"):
                        answers()
        answers()


@pytest.mark.parametrize(
    "profile, module, name",
    [("1", "flex_gemm.kernels.triton.spconv.config", "allow_tf32"), ("2.0", "flex_gemm.config", "SPCONV_ALLOW_TF32")],
)
def test_tf32_is_obeyed_at_every_call(profile, module, name, monkeypatch):
    """On a CPU nothing is rounded: what products are asked for is looked at."""
    with sparse_bridge.enable("flex_gemm", mode="standin", profile=profile):
        owner, answers, seen = importlib.import_module(module), Answers(profile), []
        home = "sparse_bridge.adapters.flex_gemm"
        for place in (f"{home}.conv", f"{home}.v2.convolutions"):
            holder = importlib.import_module(place)
            original = holder.convolve

            def spy(x, weight, kmap, epilogue, form, original=original):
                seen.append(form)
                return original(x, weight, kmap, epilogue, form)

            monkeypatch.setattr(holder, "convolve", spy)
        for value, wanted in ((True, "tf32"), (False, "ieee"), (None, "ieee")):
            seen.clear()
            monkeypatch.setattr(owner, name, value)
            answers()
            assert seen and {form[2] for form in seen} == {wanted}
        seen.clear()
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            answers()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        assert {form[2] for form in seen} == {"tf32"}


def test_the_order_of_generated_rows():
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="1"):
        spconv, answers = importlib.import_module("flex_gemm.ops.spconv"), Answers("1")
        found = []
        for mode in (0, 1, 2):
            spconv.SERIALIZATION_MODE = mode
            found.append(answers()[2])
        spconv.SERIALIZATION_MODE = 0
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(found[one], found[other])
            assert {*map(tuple, found[one].tolist())} == {*map(tuple, found[other].tolist())}


CACHES = """
    import json, sys, sparse_bridge
    sparse_bridge.enable("flex_gemm", mode="standin", profile=sys.argv[1])
    import flex_gemm
    from flex_gemm import utils
    if sys.argv[2:]:
        name, value = sys.argv[2].split("=")
        owner = flex_gemm if hasattr(flex_gemm, name) and sys.argv[1] == "1" else flex_gemm.config
        setattr(owner, name, json.loads(value))
    utils.load_autotune_cache({"mine": 1})
    print(json.dumps(sorted(utils.get_autotune_cache())))
    utils.save_autotune_cache()
"""


@pytest.mark.parametrize("profile", quick(["1"], ("1", "2.0")))
@pytest.mark.parametrize("by", quick(["environment"], ("environment", "assignment")))
@pytest.mark.slow
def test_the_file_of_the_autotune_cache(profile, by, tmp_path):
    def run(name=None, value=None):
        code = "\n".join(line[4:] for line in CACHES.splitlines())
        environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        words = []
        if name and by == "environment":
            environment[f"FLEX_GEMM_{name}"] = str(value)
        elif name:
            words = [f"{name}={json.dumps(bool(value) if value in (0, 1) else value)}"]
        done = subprocess.run(
            [sys.executable, "-c", code, profile, *words], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    home, other = tmp_path / ".flex_gemm" / "autotune_cache.json", tmp_path / "other.json"
    home.parent.mkdir()
    home.write_text('{"theirs": 2}')
    assert run() == ["mine", "theirs"]
    assert json.loads(home.read_text()) == {"theirs": 2, "mine": 1}
    assert run("AUTOTUNE_CACHE_PATH", str(other)) == ["mine"]
    assert json.loads(other.read_text()) == {"mine": 1}
    home.write_text('{"theirs": 2}')
    assert run("USE_AUTOTUNE_CACHE", 0) == ["mine"]
    assert json.loads(home.read_text()) == {"mine": 1}
    home.write_text('{"theirs": 2}')
    assert run("AUTOSAVE_AUTOTUNE_CACHE", 0) == ["mine", "theirs"]


def test_a_broken_file_is_named(tmp_path, monkeypatch):
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        utils = importlib.import_module("flex_gemm.utils")
        (tmp_path / "broken.json").write_text("{")
        with pytest.raises(ArgumentValueError, match=r"broken\.json is no autotune cache"):
            utils.load_autotune_cache(tmp_path / "broken.json")
