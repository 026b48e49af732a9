"""What is checked of a model under the bridge; each check raises or returns a short remark."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sparse_bridge import settings

from . import bridged, ddp
from .bridged import NotRun
from .compare import Limits, assert_close, assert_finite, assert_gradients_close
from .matrix import Cell
from .subject import Subject
from .trace import Task, trace

__all__ = ["TABLE", "Bench"]

_SCALES = 5  # loss scales to try, 2^16 first


@dataclasses.dataclass
class Bench:
    """Where the checks of one cell run.

    native_python: an interpreter that has the real library, or "".  passed: names of the checks
    that have passed, also in earlier processes of the same cell.
    """

    cell: Cell
    native_python: str = ""
    passed: set[str] = dataclasses.field(default_factory=set)

    @property
    def subject(self) -> Subject:
        cell = self.cell
        return Subject(cell.model, cell.device, cell.dtype, cell.size)

    @property
    def limits(self) -> Limits:
        return Limits.of(self.cell.dtype, self.cell.model.tolerances)

    def must_train(self) -> None:
        if not self.cell.model.train:
            raise NotRun("the model is for inference only")


def _import(bench: Bench) -> str:
    handle = bridged.enable(bench.cell)
    module = bench.subject.module
    assert callable(module.build) and callable(module.batch)
    status = handle.status()[bench.cell.model.framework]
    return f"{status.mode}, {status.framework} {status.version}"


def _construct(bench: Bench) -> str:
    network = bench.subject.network()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert isinstance(network, nn.Module) and count, "build() returned no parameters"
    return f"{count / 1e6:.2f} M parameters"


def _forward(bench: Bench) -> str:
    subject = bench.subject
    scene = subject.scene()
    network = subject.network().train(bench.cell.model.train)
    outputs = subject.outputs(subject.run(network, scene))
    assert_finite(outputs, "output")
    layers = bridged.assert_all_bridged(bench.cell)
    return f"{len(scene.coords):,} voxels, {layers} layers"


def _backward(bench: Bench) -> str:
    bench.must_train()
    subject = bench.subject
    network = subject.network().train()
    subject.loss(subject.run(network)).backward()
    return f"{len(subject.gradients(network))} gradients"


def _step(bench: Bench) -> str:
    bench.must_train()
    subject = bench.subject
    network = subject.network().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, eps=1e-4)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = subject.loss(subject.run(network))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert_finite(losses, "loss")
    after = list(network.parameters())
    assert_finite(after, "parameter")
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert moved, "no parameter has moved"
    return f"loss {float(losses[0]):.4g} then {float(losses[1]):.4g}"


def _autocast(dtype: torch.dtype) -> Callable[[Bench], str]:
    def check(bench: Bench) -> str:
        if bench.cell.dtype != "float32":
            raise NotRun("autocast starts from float32 parameters")
        subject = bench.subject
        network = subject.network().train(bench.cell.model.train)
        # As training code does it: in fp16 the gradients of a mean over many rows vanish.
        scaled = dtype == torch.float16 and all(parameter.dtype == torch.float32 for parameter in network.parameters())
        scaler = torch.amp.GradScaler(bench.cell.device, backoff_factor=1 / 16, enabled=scaled)
        sgd = torch.optim.SGD(network.parameters(), lr=0.0) if bench.cell.model.train else None
        for _ in range(_SCALES):
            with torch.autocast(bench.cell.device, dtype):
                result = subject.run(network)
                outputs = subject.outputs(result)
                assert_finite(outputs, "output")
                loss = None if sgd is None else subject.loss(result)
            if sgd is None or loss is None or _descends(loss, sgd, scaler):
                break
        if sgd is not None:
            subject.gradients(network)
        return ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in outputs}))

    return check


def _descends(loss: torch.Tensor, sgd: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Whether the gradients of the scaled loss are finite; if not, the scale is lowered."""
    sgd.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.unscale_(sgd)
    scaler.step(sgd)
    scaler.update()
    return scaler.get_scale() >= before


def _eval(bench: Bench) -> str:
    subject = bench.subject
    network = subject.network().eval()
    first = _inferred(subject, network)
    assert_finite(first, "output")
    with torch.inference_mode():
        again = subject.outputs(subject.run(network))
    return _same(bench, again, first)


def _tiny(bench: Bench) -> str:
    if "tiny" not in bench.cell.model.sizes:
        raise NotRun("the model asks for larger scenes")
    subject = bench.subject
    scene = subject.scene(size="tiny")
    network = subject.network().eval()
    result = subject.run(network, scene)
    assert_finite(subject.outputs(result), "output")
    if bench.cell.model.train:
        subject.loss(result).backward()
        subject.gradients(network)
    rows = torch.bincount(scene.coords[:, 0].long(), minlength=scene.batch_size)
    return f"voxels of the batch items: {', '.join(map(str, rows.tolist()))}"


def _state_dict(bench: Bench) -> str:
    subject = bench.subject
    network, other = subject.network().eval(), subject.network(seed=1).eval()
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other.load_state_dict(state, strict=True)
    same = _same(bench, _inferred(subject, other), _inferred(subject, network))
    return f"{len(state)} entries, {same}"


def _copy(bench: Bench) -> str:
    subject = bench.subject
    network = subject.network().eval()
    want = _inferred(subject, network)
    _same(bench, _inferred(subject, copy.deepcopy(network)), want)
    thawed = pickle.loads(pickle.dumps(network))
    return _same(bench, _inferred(subject, thawed), want)


def _ddp(bench: Bench) -> str:
    bench.must_train()
    with tempfile.TemporaryDirectory() as folder:
        ddp.run_ranks(bench.cell, pathlib.Path(folder))
    return f"{ddp.WORLD} gloo processes"


def _native(bench: Bench) -> str:
    cell = bench.cell
    if cell.device != "cpu":
        raise NotRun("the real library is compared on the CPU")
    if cell.dtype not in ("float32", "float64"):
        raise NotRun("on the CPU the real library computes in float32 and float64")
    python = bench.native_python
    if not python:
        for one in (cell.model.framework, *cell.model.also):
            if not bridged.installed(one):
                raise NotRun(f"the real {one} is not installed")
        python = sys.executable
    # float64 tells a wrong result from a rounded one; float32 is what users run.
    dtypes = list(dict.fromkeys(("float64", cell.dtype)))
    subjects = [Subject(cell.model, cell.device, dtype, cell.size) for dtype in dtypes]
    model = {**dataclasses.asdict(cell.model), "expect": ()}
    tasks = [
        Task(model, dtype, vars(subject.scene()), subject.network().state_dict())
        for dtype, subject in zip(dtypes, subjects, strict=True)
    ]
    remarks = []
    for subject, task, want in zip(subjects, tasks, _native_traces(python, tasks), strict=True):
        with _one_thread():  # as there: torch's sums over rows are in parts, one a thread
            got = trace(subject, task.state)
        if task.dtype != "float64":  # kinks crossed otherwise have led the weights elsewhere
            got.pop("trained", None)
        limits = Limits.of(task.dtype, cell.model.tolerances)
        remarks.append(f"{task.dtype}: {_compare_traces(got, want, limits)}")
    return "; ".join(remarks)


def _native_traces(python: str, tasks: list[Task]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "tasks.pt"), pathlib.Path(folder, "traces.pt")
        torch.save(tasks, source)
        done = subprocess.run(
            [python, "-m", "compat.trace", str(source), str(target)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        sys.stderr.write(done.stderr)
        last = done.stderr.strip().rpartition("\n")[2]
        ending = f"the real library's process ended with {done.returncode}: {last}"
        if done.returncode < 0:
            raise NotRun(ending)
        assert done.returncode == 0, ending
        return torch.load(target, weights_only=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_traces(got: dict[str, Any], want: dict[str, Any], limits: Limits) -> str:
    """Every stage that the real library ran."""
    remarks = [f"native {stage} raises {why}" for stage, why in want["errors"].items()]
    if "train" not in want and "eval" not in want:
        raise NotRun("; ".join(remarks))
    limit, worst = limits.output, []
    if "eval" in want:
        worst.append(assert_close(got["eval"], want["eval"], limit, "eval output"))
    if "train" in want:
        worst.append(assert_close(got["train"], want["train"], limit, "training output"))
        assert_gradients_close(got["gradients"], want["gradients"], limits)
        losses = [torch.tensor(one["losses"], dtype=torch.float64) for one in (got, want)]
        assert_close(losses[:1], losses[1:], 100 * limit, "losses of the steps")
        if "trained" in got:
            assert_close(got["trained"], want["trained"], 100 * limit, "output after the steps")
    return ", ".join([f"outputs within {max(worst):.0e}", *remarks])


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """torch's dense convolutions and torchsparse round to TF32 by default."""
    switches: list[tuple[Any, str]] = [(torch.backends.cudnn, "allow_tf32"), (torch.backends.cuda.matmul, "allow_tf32")]
    torchsparse = sys.modules.get("torchsparse")
    if torchsparse is not None and hasattr(torchsparse.backends, "allow_tf32"):
        switches.append((torchsparse.backends, "allow_tf32"))
    before = [getattr(owner, name) for owner, name in switches]
    for owner, name in switches:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for (owner, name), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def _reference(bench: Bench) -> str:
    """The same weights in fp64 with every layer as one explicit matrix product."""
    if "native" in bench.passed:
        raise NotRun("compared with the real library instead")
    if bench.cell.dtype == "float64":
        raise NotRun("the reference is float64 itself")
    subject = bench.subject
    cell = bench.cell
    network = subject.network()
    exact = Subject(cell.model, cell.device, "float64", cell.size)
    twin = exact.network()
    twin.load_state_dict(network.state_dict())
    train = cell.model.train
    with _without_tf32():
        got = _pass(subject, network.train(train))
    try:
        with settings.override(dataflow="explicit"):
            want = _pass(exact, twin.train(train))
    except torch.cuda.OutOfMemoryError:
        raise NotRun("the reference does not fit into the GPU's memory") from None
    worst = assert_close(got[0], want[0], bench.limits.output, "output")
    if train:
        assert_gradients_close(got[1], want[1], bench.limits)
    return f"outputs within {worst:.0e} of float64, explicit dataflow"


def _pass(subject: Subject, network: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    result = subject.run(network)
    outputs = [one.detach() for one in subject.outputs(result)]
    if not network.training:
        return outputs, {}
    subject.loss(result).backward()
    return outputs, subject.gradients(network)


def _inferred(subject: Subject, network: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return subject.outputs(subject.run(network))


def _same(bench: Bench, got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """Equal bits, or what a model's own atomic operations on a GPU leave of that."""
    exact = len(got) == len(want) and all(map(torch.equal, got, want))
    if not exact:
        assert bench.cell.device == "cuda", "outputs differ from those of the same weights"
        assert_close(got, want, bench.limits.output, "output")
    return "equal bits" if exact else "equal within rounding"


TABLE: dict[str, Callable[[Bench], str]] = {
    "import": _import,
    "construct": _construct,
    "forward": _forward,
    "backward": _backward,
    "step": _step,
    "autocast_fp16": _autocast(torch.float16),
    "autocast_bf16": _autocast(torch.bfloat16),
    "eval": _eval,
    "tiny": _tiny,
    "state_dict": _state_dict,
    "copy": _copy,
    "ddp": _ddp,
    "native": _native,
    "reference": _reference,
}
