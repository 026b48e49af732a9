"""A wrong answer fails: every recorded answer is compared, and so is what a program computes."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch

import sparse_bridge
from tests.adapters.spconv import apis
from tests.adapters.torchsparse.conftest import speaking
from tests.goldens import driver
from tests.goldens.compare import Mismatch
from tests.goldens.flexgemm.run_golden import FlexGEMM
from tests.goldens.minkowski.run_golden import Minkowski
from tests.goldens.spconv.run_golden import SpConv
from tests.goldens.torchsparse.run_golden import TorchSparse
from tests.quick import quick
from tests.recorded import RECORDED

pytestmark = RECORDED
# The dialect; how its library is met; what the arrays of answers begin with; where a manifest holds
# answers that are no array, and the keys there that are none.
DIALECTS = {
    "spconv": (
        SpConv,
        apis.standin,
        ("out_", "dense", "g:", "after:", "ret"),
        ("results", "returns", "raises", "raises_at", "expect_keys"),
    ),
    "torchsparse": (TorchSparse, lambda: speaking("2.1"), ("out/", "grad/"), ("outputs", "stride", "spatial_range")),
    "minkowski": (Minkowski, lambda: sparse_bridge.enable("minkowski"), ("out.", "grad.", "buf."), ("expect",)),
    "flexgemm": (
        FlexGEMM,
        lambda: sparse_bridge.enable("flex_gemm", mode="standin"),
        ("out:",),
        ("dtypes", "raises", "values", "parameters", "defaults", "names", "callables"),
    ),
}
NAMES = ("var", "type", "cmp", "array", "ordered")


def smallest(framework, prefixes):
    """The smallest case of every family, and of every kind of answer; one profile of
    torchsparse."""
    chosen = {}
    for entry in driver.public(framework):
        if "2.1" not in entry.get("profiles", ["2.1"]):
            continue
        size = os.path.getsize(entry["path"]) if entry["path"] else 0
        names = driver.load_arrays(entry["path"])
        held = {prefix for prefix in prefixes for name in names if name.startswith(prefix)}
        for key in (entry["family"], entry.get("kind") or entry["spec"]["kind"], *held):
            if size < chosen.get(key, (np.inf,))[0]:
                chosen[key] = size, entry
    return list({entry["id"]: entry for _, entry in chosen.values()}.values())


def another(value):
    """An array or a plain value that is not this one."""
    if isinstance(value, np.ndarray):
        wrong = value.copy()
        last = (-1,) * wrong.ndim
        if wrong.dtype.kind == "f":
            wrong[last] += 0.2 * (np.sqrt(np.mean(wrong.astype(np.float64) ** 2)) + abs(wrong[last]))
        else:
            wrong[last] ^= 1
        return wrong if value.any() or wrong.dtype.kind != "f" else np.ones_like(value)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"not {value}"


def leaves(value, path):
    """Places of the plain values inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        if isinstance(inside, (dict, list)):
            yield from leaves(inside, (*path, key))
        elif key not in NAMES:
            yield (*path, key)


def wrong_entries(entry, keys):
    """The entry with one answer changed, and which."""
    root = ("spec",) if keys != ("expect",) else ()
    for key in keys:
        answers = entry["spec"] if root else entry
        places = leaves({key: answers[key]}, root) if key in answers else ()
        for place in places:
            wrong = copy.deepcopy(entry)
            inside = wrong
            for part in place[:-1]:
                inside = inside[part]
            inside[place[-1]] = another(inside[place[-1]])
            yield place, wrong


def any_of_several(entry):
    """Arrays of answers that are examples: any point of a voxel may stand for it."""
    for output in entry["spec"].get("outputs", ()):
        if isinstance(output, dict) and (output.get("as") == "quantize" or "any_of" in output):
            yield f"out.{output['name']}."


def passes(dialect, entry, arrays):
    try:
        dialect(entry, arrays).judge()
    except (Mismatch, AttributeError):  # the latter of a name that the library does not have
        return False
    return True


@pytest.mark.parametrize("framework", quick(["spconv", "minkowski"], DIALECTS))
def test_a_change_of_any_answer_fails(framework):
    dialect, library, prefixes, keys = DIALECTS[framework]
    unseen, changes = [], 0
    with library():
        for entry in smallest(framework, prefixes):
            arrays, free = driver.load_arrays(entry["path"]), tuple(any_of_several(entry))
            assert passes(dialect, entry, arrays), entry["id"]
            for name, value in arrays.items():
                if name.startswith(prefixes) and not name.startswith(free or "\n") and value.size:
                    changes += 1
                    if passes(dialect, entry, {**arrays, name: another(value)}):
                        unseen.append((entry["id"], name))
            for place, wrong in wrong_entries(entry, keys):
                changes += 1
                if passes(dialect, wrong, arrays):
                    unseen.append((entry["id"], place))
    assert unseen == [] and changes >= 50


def wrong_weights(dialect):
    """The dialect with a library that computes as if one weight were 1 % larger."""

    class Wrong(dialect):
        def load_weights(self, prefix):
            super().load_weights(prefix)
            next(self.modules.parameters()).data.mul_(1.01)

        def input(self, name, how):
            value = super().input(name, how)
            if name == "weight":
                value.data.mul_(1.01)
            return value

    return Wrong


@pytest.mark.parametrize(
    "framework, name, place",
    [
        ("spconv", "subm3d_k3_c3_16", "out features"),
        ("torchsparse", "n21_k3", "y features"),
        ("minkowski", "conv_d3_k3_16_33", "y features"),
        ("flexgemm", "subm_k3_16_16", "feats"),
    ],
)
def test_a_wrong_result_fails(framework, name, place):
    dialect, library, *_ = DIALECTS[framework]
    (entry,) = [entry for entry in driver.public(framework) if entry["id"] == name]
    with library():
        assert driver.judge(dialect, entry).comparisons > 3
        with pytest.raises(Mismatch, match=f"^{place}.*: error"):
            driver.judge(wrong_weights(dialect), entry)


def test_a_case_that_compares_nothing_fails():
    entry = {"id": "none", "spec": {"kind": "surface", "shape": []}, "path": None}
    with DIALECTS["flexgemm"][1](), pytest.raises(Mismatch, match="nothing was compared"):
        driver.judge(FlexGEMM, entry)


def test_an_error_elsewhere_is_not_the_recorded_error():
    """What raises while arguments are read, or at another statement, proves nothing."""
    with DIALECTS["flexgemm"][1]():
        spec = {"kind": "error", "call": "ops.serialize.encode_seq", "raises": ["Exception"]}
        entry = {"id": "e", "spec": {**spec, "args": [{"array": "absent"}]}}
        with pytest.raises(KeyError):
            FlexGEMM(entry, {}).judge()
        spec["raises_at"], spec["args"] = "another", []
        with pytest.raises(Mismatch, match="expected at another"):
            FlexGEMM({"id": "e", "spec": spec}, {}).judge()


def test_values_that_are_not_finite():
    report = driver.Report(TorchSparse.measure, 1e9)
    nan = torch.tensor([1.0, float("nan")])
    with pytest.raises(Mismatch, match="1 values are not finite"):
        report.close("y", nan, np.ones(2, np.float32))
    report.close("y", nan, nan.numpy())
    with pytest.raises(Mismatch, match="0 values"):
        report.close("y", torch.ones(2), nan.numpy())


def test_rows_are_a_set_with_repeats():
    report = driver.Report(SpConv.measure, 1e-4)
    want = np.array([[0, 1], [0, 0], [0, 1]])
    assert want[report.rows("c", want[[1, 0, 2]], want)].shape == want.shape
    for wrong in (want[:2], want[[1, 1, 0]], want[:, :1]):
        with pytest.raises(Mismatch):
            report.rows("c", wrong, want)
    with pytest.raises(Mismatch, match="order"):
        report.rows("c", want[[1, 0, 2]], want, ordered=True)
