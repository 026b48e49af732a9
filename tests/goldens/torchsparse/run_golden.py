"""Replay stored torchsparse results against whatever package is importable as `torchsparse`.

    python run_golden.py --cases public --profile 2.1 --device cuda \
        --enable "import sparse_bridge; sparse_bridge.enable('torchsparse')"

Needs numpy and torch only. The case format is described in README.md.
"""

import importlib
import os
import sys

import numpy as np
import torch

if __name__ == "__main__":  # as a file: the folder that holds `tests`
    sys.path.insert(0, os.path.abspath(__file__).rsplit(os.sep, 4)[0])

from tests.goldens import driver
from tests.goldens.driver import Mismatch, load_arrays


# ---------------------------------------------------------------- building blocks named in a spec
def dotted(root, path):
    obj, done = root, root.__name__
    for part in path.split("."):
        done += "." + part
        try:
            obj = getattr(obj, part)
        except AttributeError:
            obj = importlib.import_module(done)
    return obj


def make_layer(entry):
    cls = entry[0]
    args = entry[1] if len(entry) > 1 and isinstance(entry[1], list) else []
    kwargs = entry[-1] if isinstance(entry[-1], dict) else {}

    def fix(v):
        return tuple(v) if isinstance(v, list) else v

    if cls.startswith("torch.nn."):
        maker = getattr(torch.nn, cls[9:])
    else:
        maker = dotted(importlib.import_module("torchsparse"), "nn." + cls)
    return maker(*[fix(a) for a in args], **{k: fix(v) for k, v in kwargs.items()})


def make_module(layers):
    if isinstance(layers[0], str):
        return make_layer(layers)
    return torch.nn.Sequential(*[make_layer(e) for e in layers])


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
    "layer": lambda *e: make_layer(list(e)),
    "setcol": lambda a, cols, v: a.index_copy(
        1, torch.as_tensor(cols, device=a.device), torch.full_like(a[:, : len(cols)], v)
    ),
}


class Program:
    """A case turned into modules plus a list of statements."""

    def __init__(self, case, arrays, device="cpu", dtype=torch.float32, module=None):
        self.case, self.A, self.device, self.dtype = case, arrays, device, dtype
        self.ts = importlib.import_module("torchsparse")
        importlib.import_module("torchsparse.nn")
        spec = case["spec"]
        if case["kind"] == "net":
            self.modules = {"net": make_module(spec["layers"])}
            self.prefix = {"net": ""}
            self.inputs = {
                "x": dict(
                    spec.get("input", {}), type="sparse", coords="in_coords", feats="in_feats"
                )
            }
            self.steps = [["y", "m:net", ["$x"]]]
            out = {"var": "y", "type": spec.get("output", "sparse")}
            for k in ("ordered", "stride", "spatial_range"):
                if k in spec:
                    out[k] = spec[k]
            self.outputs = [out]
        else:
            self.modules = {n: make_module(m) for n, m in spec.get("modules", {}).items()}
            self.prefix = {n: n + "." for n in self.modules}
            self.inputs, self.steps, self.outputs = (
                spec.get("inputs", {}),
                spec["steps"],
                spec["outputs"],
            )
        self.train = spec.get("train", False)

    # ---- weights
    def entries(self):
        for n, m in self.modules.items():
            for k, v in m.state_dict().items():
                yield self.prefix[n] + k, v

    def load(self):
        for n, m in self.modules.items():
            p = "w/" + self.prefix[n]
            state = {
                k[len(p) :]: torch.from_numpy(self.A[k].copy()) for k in self.A if k.startswith(p)
            }
            if self.prefix[n] or len(self.modules) == 1:
                m.load_state_dict(state, strict=True)
            m.to(self.device)
            if self.dtype == torch.float64:
                m.double()
            m.train(self.train)

    # ---- evaluation
    def tensor(self, name, grad=False):
        t = torch.from_numpy(np.array(self.A[name])).to(self.device)
        if t.is_floating_point():
            t = t.to(self.dtype)
            if grad:
                t.requires_grad_()
                self.leaves[name] = t
        return t

    def value(self, v):
        if isinstance(v, str) and v.startswith("$"):
            path = v[1:].split(".")
            obj = self.env[path[0]]
            for p in path[1:]:
                obj = getattr(obj, p)
            return obj
        if isinstance(v, list):
            return [self.value(i) for i in v]
        if isinstance(v, dict):
            if "tuple" in v:
                return tuple(self.value(i) for i in v["tuple"])
            if "slice" in v:
                return slice(*v["slice"])
            if "dtype" in v:
                return getattr(torch, v["dtype"])
            if "array" in v:
                return np.array(self.A[v["array"]])
            if "device" in v:
                return self.device
            return {k: self.value(i) for k, i in v.items()}
        return v

    def call(self, fn, args, kwargs):
        kind, name = fn.split(":", 1)
        f = {
            "m": lambda: self.modules[name],
            "op": lambda: OPS[name],
            "ts": lambda: dotted(self.ts, name),
            "torch": lambda: dotted(torch, name),
        }[kind]()
        return f(*self.value(args), **self.value(kwargs))

    def run(self):
        self.env, self.leaves = {}, {}
        for name, d in self.inputs.items():
            if d["type"] == "sparse":
                kw = {"stride": d.get("stride", 1)}
                kw["stride"] = (
                    tuple(kw["stride"]) if isinstance(kw["stride"], list) else kw["stride"]
                )
                if d.get("spatial_range") is not None:
                    kw["spatial_range"] = tuple(d["spatial_range"])
                feats = self.tensor(d["feats"], True)
                if d.get(
                    "fresh", True
                ):  # modules may write into their input; keep the leaf untouched
                    feats = feats * 1 if feats.is_floating_point() else feats
                self.env[name] = self.ts.SparseTensor(feats, self.tensor(d["coords"]), **kw)
            elif d["type"] == "tensor":
                self.env[name] = self.tensor(d["array"], d.get("grad", False))
            else:
                self.env[name] = np.array(self.A[d["array"]])
        for step in self.steps:
            out, fn, args = step[:3]
            self.env[out] = self.call(fn, args, step[3] if len(step) > 3 else {})
        return {o["var"]: self.value("$" + o["var"]) for o in self.outputs}

    def parameters(self):
        for n, m in self.modules.items():
            for k, p in m.named_parameters():
                yield self.prefix[n] + k, p


# ---------------------------------------------------------------- comparison
def as_numpy(x):
    return x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)


def plain(x):
    if torch.is_tensor(x) or isinstance(x, (np.ndarray, np.generic)):
        return as_numpy(x).tolist()
    if isinstance(x, (list, tuple)):
        return [plain(i) for i in x]
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    return x


def match_rows(got, want):
    """perm with got[perm] == want; raises when the sets differ."""
    g, w = got.astype(np.int64), want.astype(np.int64)
    if g.ndim != 2 or g.shape[1:] != w.shape[1:]:
        raise Mismatch(f"coordinates have shape {g.shape}, expected {w.shape}")
    gi = {tuple(r): i for i, r in enumerate(g.tolist())}
    if len(gi) != len(g):
        raise Mismatch(f"{len(g) - len(gi)} duplicate output coordinates")
    ws = {tuple(r) for r in w.tolist()}
    missing, extra = sorted(ws - gi.keys()), sorted(gi.keys() - ws)
    if missing or extra:
        raise Mismatch(
            f"coordinates differ: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} extra {extra[:3]}"
        )
    return np.array([gi[tuple(r)] for r in w.tolist()], dtype=np.int64)


def close(got, want, tol, what, log):
    if got.shape != want.shape:
        raise Mismatch(f"{what}: shape {got.shape}, expected {want.shape}")
    if not want.size:
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isfinite(g), np.isfinite(w)):
        raise Mismatch(f"{what}: finite entries differ")
    g, w = np.where(np.isfinite(w), g, 0), np.where(np.isfinite(w), w, 0)
    scale = max(float(np.sqrt((w**2).mean())), 1e-12)
    err = float(np.abs(g - w).max()) / scale
    log[what] = err
    if err > tol:
        at = np.unravel_index(np.abs(g - w).argmax(), w.shape)
        raise Mismatch(
            f"{what}: error {err:.2e} of RMS > {tol:g} (at {tuple(map(int, at))}: "
            f"got {g[at]:.6g}, expected {w[at]:.6g})"
        )


def compare_output(o, got, A, tol, log):
    """Returns the row permutation (or None)."""
    v, kind = o["var"], o.get("type", "sparse")
    if kind == "sparse":
        stride = [int(i) for i in got.stride]
        if "stride" in o and stride != list(o["stride"]):
            raise Mismatch(f"{v}: stride {stride}, expected {o['stride']}")
        if "spatial_range" in o:
            r = getattr(got, "spatial_range", None)
            r = None if r is None else [int(i) for i in r[:4]]
            if r != o["spatial_range"]:
                raise Mismatch(f"{v}: spatial_range {r}, expected {o['spatial_range']}")
        perm = match_rows(as_numpy(got.coords), A[f"out/{v}/coords"])
        if len(got.feats) != len(perm):
            raise Mismatch(f"{v}: {len(got.feats)} feature rows for {len(perm)} coordinates")
        if o.get("ordered") and not np.array_equal(perm, np.arange(len(perm))):
            raise Mismatch(f"{v}: right coordinates, but row order differs from the contract")
        close(as_numpy(got.feats)[perm], A[f"out/{v}/feats"], tol, v + ".feats", log)
        return perm
    if kind == "value":
        if plain(got) != o["value"]:
            raise Mismatch(f"{v}: {plain(got)!r}, expected {o['value']!r}")
        return None
    want, g = A[f"out/{v}"], as_numpy(got)
    if "dtype" in o and str(g.dtype) not in o["dtype"]:
        raise Mismatch(f"{v}: dtype {g.dtype}, expected {' or '.join(o['dtype'])}")
    if kind == "partition":  # equal entries must be equal in the same places; values are free
        a, b = (np.unique(x.reshape(-1), return_inverse=True)[1].reshape(-1) for x in (g, want))
        pairs = set(zip(a.tolist(), b.tolist(), strict=False))
        if g.shape != want.shape or not len(pairs) == len(set(a.tolist())) == len(set(b.tolist())):
            raise Mismatch(f"{v}: equal entries are not in the same places")
    elif kind == "rows":
        match_rows(g, want)
    elif np.issubdtype(want.dtype, np.floating):
        close(g, want, tol, v, log)
    elif g.shape != want.shape or not np.array_equal(g, want):
        bad = "" if g.shape != want.shape else f", {int((g != want).sum())} entries differ"
        raise Mismatch(f"{v}: shape {g.shape}, expected {want.shape}{bad}")
    return None


def run_case(case, A, device="cpu", dtype=torch.float32, grads=True):
    log, tol = {}, case.get("tol", 1e-4)
    torch.manual_seed(0)
    prog = Program(case, A, device, dtype)
    shapes = {k: tuple(v.shape) for k, v in prog.entries()}
    stored = {k[2:]: A[k].shape for k in A if k.startswith("w/")}
    if shapes != stored:
        diff = sorted(set(shapes.items()) ^ set(stored.items()))
        raise Mismatch(f"state_dict keys or shapes differ: {diff[:4]}")
    prog.load()
    want_grad = grads and case["spec"].get("grad", False)
    with torch.set_grad_enabled(want_grad):
        outs = prog.run()
    loss = 0
    for o in prog.outputs:
        perm = compare_output(o, outs[o["var"]], A, tol, log)
        if want_grad and f"up/{o['var']}" in A:
            y = outs[o["var"]]
            y = y.feats if perm is not None else y
            up = torch.from_numpy(np.array(A[f"up/{o['var']}"])).to(y)
            if perm is not None:
                y = y[torch.as_tensor(perm, device=y.device)]
            loss = loss + (y * up).sum()
    if want_grad:
        loss.backward()
        got = {k: t.grad for k, t in prog.leaves.items()}
        got.update({"w/" + k: p.grad for k, p in prog.parameters()})
        for k in sorted(A):
            if k.startswith("grad/"):
                g = got.get(k[5:])
                g = np.zeros_like(A[k]) if g is None else as_numpy(g)
                if np.issubdtype(A[k].dtype, np.floating):
                    close(g, A[k], tol, k, log)
    return log


# ---------------------------------------------------------------- command line
def main():
    ap = driver.parser(__doc__)
    ap.add_argument("--profile", required=True, choices=["1.4", "2.0", "2.1"])
    ap.add_argument(
        "--source",
        choices=["real", "oracle"],
        help="real: only what an upstream CPU build of this profile reproduced, as far as it did",
    )
    ap.add_argument("--forward-only", action="store_true")
    ap.add_argument(
        "--double", action="store_true", help="run in float64 (for reference implementations)"
    )
    ap.add_argument("--tol", type=float, help="override the tolerance of every case")
    a = ap.parse_args()
    driver.enable(a.enable)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        backends = importlib.import_module("torchsparse.backends")
        if hasattr(backends, "allow_tf32"):
            backends.allow_tf32 = False
    except Exception:
        pass

    def reach(case):
        """How far an upstream build of the profile reproduced a case."""
        return case.get("verified_on", {}).get(a.profile)

    def wanted(case):
        real = a.source != "real" or reach(case) is not None
        return a.profile in case["profiles"] and real and a.source in (None, case["source"])

    def judged(case):
        if a.tol:
            case["tol"] = a.tol
        grads = not a.forward_only and not (a.source == "real" and reach(case) == "forward")
        dtype = torch.float64 if a.double else torch.float32
        errors = run_case(case, load_arrays(case["path"]), a.device, dtype, grads)
        return max(errors.values(), default=0.0), max(errors, key=errors.get, default="exact")

    cases = filter(wanted, driver.cases_of(a.cases, a.filter))
    return driver.finish(driver.replay(cases, judged, a), a, profile=a.profile)


if __name__ == "__main__":
    sys.exit(main())
