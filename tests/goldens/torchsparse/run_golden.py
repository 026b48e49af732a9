"""Replay stored torchsparse results against whatever package is importable as `torchsparse`.

    python run_golden.py --cases public --profile 2.1 --device cuda \
        --enable "import sparse_bridge; sparse_bridge.enable('torchsparse')"

Needs numpy and torch only. The case format is described in README.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import numpy as np
import torch

if __name__ == "__main__":  # as a file: the folder that holds `tests`
    sys.path.insert(0, os.path.abspath(__file__).rsplit(os.sep, 4)[0])

from tests.goldens import driver
from tests.goldens.compare import Measure, dtype_name, numpy_of
from tests.goldens.interpreter import Case, Program
from tests.goldens.names import dotted


def plain(x):
    """A value as JSON holds it."""
    if torch.is_tensor(x) or isinstance(x, (np.ndarray, np.generic)):
        return numpy_of(x).tolist()
    if isinstance(x, (list, tuple)):
        return [plain(i) for i in x]
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    return x


def tupled(v):
    return tuple(v) if isinstance(v, list) else v


def same_places(a, b):
    """Equal entries of one array are equal entries of the other; their values are free."""
    if a.shape != b.shape:
        return False
    a, b = (np.unique(x.reshape(-1), return_inverse=True)[1].reshape(-1).tolist() for x in (a, b))
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


OPS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "eq": lambda a, b: a == b,
    "item": lambda a, *i: a[i[0] if len(i) == 1 else i],
    "cols": lambda a, i: a[:, i],
    "len": len,
    "method": lambda a, name, *x: getattr(a, name)(*x),
    "set": lambda a, name, v: setattr(a, name, v),
    "identity": lambda a: a,
    "setcol": lambda a, cols, v: a.index_copy(
        1, torch.as_tensor(cols, device=a.device), torch.full_like(a[:, : len(cols)], v)
    ),
}


class TorchSparse(Case):
    """Lists of layers, and statements whose functions are `m:`, `op:`, `ts:` or `torch:` names."""

    framework = "torchsparse"
    weight, gradient = "w/", "grad/"
    measure = Measure(1e-12, 1e-12)
    absent_is_zero = True

    @classmethod
    def options(cls, parser):
        parser.add_argument("--profile", required=True, choices=["1.4", "2.0", "2.1"])
        parser.add_argument("--forward-only", action="store_true")

    @classmethod
    def select(cls, entry, args):
        """`--source real`: what an upstream CPU build of the profile reproduced, as far as it
        did."""
        reach = entry.get("verified_on", {}).get(args.profile)
        if args.profile not in entry["profiles"] or (args.source == "real" and reach is None):
            return None
        if args.forward_only or (args.source == "real" and reach == "forward"):
            entry = {**entry, "spec": {**entry["spec"], "grad": False}}
        return super().select(entry, args)

    @classmethod
    def begin(cls, args):
        with contextlib.suppress(Exception):
            backends = importlib.import_module("torchsparse.backends")
            if hasattr(backends, "allow_tf32"):
                backends.allow_tf32 = False

    def read(self):
        spec = self.spec
        modes = {"train": spec.get("train", False), "grad": spec.get("grad", False)}
        if self.entry["kind"] != "net":
            modules, inputs = spec.get("modules", {}), spec.get("inputs", {})
            return Program(modules, inputs, spec["steps"], spec["outputs"], **modes)
        x = {**spec.get("input", {}), "type": "sparse", "coords": "in_coords", "feats": "in_feats"}
        out = {k: spec[k] for k in ("ordered", "stride", "spatial_range") if k in spec}
        out |= {"var": "y", "type": spec.get("output", "sparse")}
        steps = [["y", "m:net", ["$x"]]]
        return Program({"net": spec["layers"]}, {"x": x}, steps, [out], bare="net.", **modes)

    def module(self, description):
        if isinstance(description[0], str):
            return self.layer(*description)
        return torch.nn.Sequential(*[self.layer(*entry) for entry in description])

    def layer(self, name, *rest):
        """[class, positional arguments?, keywords?]"""
        args = rest[0] if rest and isinstance(rest[0], list) else []
        kwargs = rest[-1] if rest and isinstance(rest[-1], dict) else {}
        root, path = (torch, name[6:]) if name.startswith("torch.") else (self.library, "nn." + name)
        return dotted(root, path)(*map(tupled, args), **{k: tupled(v) for k, v in kwargs.items()})

    def input(self, name, how):
        if how["type"] == "tensor":
            return self.tensor(how["array"], how.get("grad", False))
        if how["type"] != "sparse":
            return np.array(self.arrays[how["array"]])
        keywords = {"stride": tupled(how.get("stride", 1))}
        if how.get("spatial_range") is not None:
            keywords["spatial_range"] = tuple(how["spatial_range"])
        feats = self.tensor(how["feats"], True)
        if how.get("fresh", True) and feats.is_floating_point():
            feats = feats * 1  # modules may write into their input
        return self.library.SparseTensor(feats, self.tensor(how["coords"]), **keywords)

    def function(self, operation):
        kind, name = operation.split(":", 1)
        if operation == "op:layer":
            return self.layer
        if kind in ("m", "op"):
            return (self.modules if kind == "m" else OPS)[name]
        return dotted({"ts": self.library, "torch": torch}[kind], name)

    def mark_array(self, v, whole):
        return np.array(self.arrays[v])

    def upstream(self, output):
        return f"up/{output['var']}"

    def check(self, output):
        name, kind = output["var"], output.get("type", "sparse")
        got = self.values[name]
        if kind == "sparse":
            return self.check_sparse(name, got, output)
        if kind == "value":
            self.report.same(name, plain(got), output["value"])
            return None
        want = self.arrays[f"out/{name}"]
        if "dtype" in output:
            known = dtype_name(got) in output["dtype"]
            self.report.require(known, f"{name}: {dtype_name(got)} instead of {output['dtype']}")
        if kind == "partition":
            held = same_places(numpy_of(got), want)
            self.report.require(held, f"{name}: equal entries are not in the same places")
        elif kind == "rows":
            self.report.rows(name, numpy_of(got).astype(np.int64), want.astype(np.int64))
        else:
            self.report.array(name, got, want)
        return got

    def check_sparse(self, name, got, output):
        if "stride" in output:
            self.report.same(f"{name} stride", [int(i) for i in got.stride], output["stride"])
        if "spatial_range" in output:
            extent = getattr(got, "spatial_range", None)
            extent = None if extent is None else [int(i) for i in extent[:4]]
            self.report.same(f"{name} spatial_range", extent, output["spatial_range"])
        return self.compare_sparse(
            name,
            numpy_of(got.coords).astype(np.int64),
            got.feats,
            self.arrays[f"out/{name}/coords"].astype(np.int64),
            self.arrays[f"out/{name}/feats"],
            output.get("ordered", False),
        )


if __name__ == "__main__":
    sys.exit(driver.main(TorchSparse, __doc__))
