"""One peer in a process of its own: `python -m benchmarks.worker PEER`, driven line by line.

Requests and answers are JSON objects, one per line of standard input and of a private copy of
standard output; whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
import traceback
from typing import Any

import torch

from sparse_bridge.tools.harness.processes import channel, write

from . import floor, measure, peers
from .registry import Case
from .workloads import Scan, load, pair_count
from .works import Work, build

__all__ = ["Session", "serve"]

_WARM_CALLS, _WARM_SECONDS = 7, 0.7  # more than a peer needs to see what repeats
_STREAM_SCENES = 6  # whose largest peak counts: one peer stands at another scene than the next
_WARM_STREAM = 19, 60.0  # twenty scenes, whatever they take; figures are of those after them
_LONG_SECONDS = 0.25  # a call that hides what taking over the device costs


class Session:
    """What a worker holds: its peer, the last scene, and the case that is open."""

    def __init__(self, peer: peers.Peer):
        self.peer = peer
        self._threads = torch.get_num_threads()
        self._scene: tuple[tuple[Any, ...], Scan] | None = None
        self._work: Work | None = None
        self._case: Case | None = None
        self._call_seconds = 0.0
        self._kept: float | None = None  # MB before the first call

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request; `op` names a method below."""
        arguments = {key: value for key, value in request.items() if key != "op"}
        return getattr(self, "op_" + request["op"])(**arguments)

    def op_hello(self, device: str) -> dict[str, Any]:
        """Versions of what runs here."""
        found = {"torch": torch.__version__, "python": platform.python_version()}
        for name in ("triton", "numpy"):
            module = sys.modules.get(name)
            if module is not None:
                found[name] = module.__version__
        if self.peer.name.startswith("bridge"):
            import sparse_bridge

            found["sparse_bridge"] = sparse_bridge.__version__
        else:
            found[self.peer.package] = self.peer.version()
        if device == "cuda":
            found["gpu"] = torch.cuda.get_device_name()
        return {"versions": found}

    def op_probe(self, dtype: str, device: str) -> dict[str, Any]:
        """How fast the device is: see `floor`."""
        rates = floor.probe(dtype, torch.device(device))
        self._empty_cache()
        return dataclasses.asdict(rates)

    def op_open(self, case: dict[str, Any], pairs: bool, warm: bool = True, check: bool = True) -> dict[str, Any]:
        """Make a case ready; its first call is timed alone, then it is warmed up.

        Args:
            case: fields of a `registry.Case`.
            pairs: also count the pairs of a layer.
            warm: False stops after the first call.
            check: also describe the result, for a comparison between peers.
        """
        self.op_close()
        self._case = one = Case(**case)
        torch.set_num_threads(one.threads or self._threads)
        scans = [self._scan(one, source) for source in one.source.split("+")]
        scan = scans[0]
        self._work = build(self.peer, one, scans)
        device = scan.coords.device
        self._kept = measure.kept_memory(device)
        first, result = measure.first_call(self._work, device)
        found: dict[str, Any] = {"rows": len(scan.coords), "first_s": first}
        if check:
            found["check"] = {"api": self.peer.api, **_fingerprint(result)}
        del result
        if pairs and one.channels:
            found["pairs"] = pair_count(scan)
        if warm:
            begin = time.perf_counter()
            calls, seconds = _WARM_STREAM if one.streams else (_WARM_CALLS, _WARM_SECONDS)
            for _ in range(calls):
                self._work.prepare()
                self._call_seconds, _ = measure.first_call(self._work, device)
                if time.perf_counter() - begin > seconds:
                    break
        return found

    def op_round(self, seconds: float) -> dict[str, Any]:
        """Milliseconds of the calls of one round."""
        work, case = self._opened()
        settle, device = self._call_seconds < _LONG_SECONDS, torch.device(case.device)
        if case.work.startswith("issue-"):
            return {"ms": measure.issue_times(work, device, seconds, settle)}
        clock = time.process_time if case.threads == 1 else time.perf_counter
        return {"ms": measure.times(work, device, seconds, settle, clock)}

    def op_memory(self) -> dict[str, Any]:
        """MB of one call: on top of its inputs, and in all; and MB that stay between calls, on top
        of inputs and weights."""
        work, case = self._opened()
        device = torch.device(case.device)
        found = measure.peak_memory(work, device, _STREAM_SCENES if case.streams else 1)
        if found is None:
            return {}
        work.clear()
        kept = measure.kept_memory(device)
        held = None if kept is None or self._kept is None else max(kept - self._kept, 0.0)
        watched = case.timed and (case.network or case.work in ("forward", "train"))
        busy = measure.busy_time(work, device) if watched else None
        return {"peak_mb": found[0], "total_mb": found[1], "held_mb": held, "busy_ms": busy}

    def op_close(self) -> dict[str, Any]:
        """Give the memory of the open case back."""
        self._work = self._case = None
        self.peer.forget()
        self._empty_cache()
        return {}

    def _opened(self) -> tuple[Work, Case]:
        assert self._work is not None and self._case is not None, "no case is open"
        return self._work, self._case

    def _scan(self, case: Case, source: str) -> Scan:
        batch = 1 if case.streams else case.batch  # streams make batches of crops
        key = (source, batch, case.voxel_size, case.device)
        if self._scene is None or self._scene[0] != key:
            self._scene = None  # first, so that two large scenes never share the memory
            self._scene = key, load(source, batch, case.voxel_size, case.device)
        return self._scene[1]

    def _empty_cache(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _fingerprint(result: torch.Tensor) -> dict[str, Any]:
    """Rows and root mean square: what does not depend on the order of the rows."""
    norm = torch.linalg.vector_norm(result, dtype=torch.float32).item()
    rms = norm / max(result.numel(), 1) ** 0.5
    rows = len(result) if result.dim() else 1
    return {"rows": rows, "rms": rms if math.isfinite(rms) else None}


def serve(name: str) -> int:
    """Answer requests until standard input ends. An error is an answer; the driver decides."""
    answers = channel()  # what libraries print must not mix with the answers
    session: Session | None = None
    for line in sys.stdin:
        try:
            if session is None:
                session = Session(peers.load(name))
            answer = session.handle(json.loads(line))
        except Exception as error:  # whatever a library raises belongs into the results
            traceback.print_exc()
            answer = {
                "error": f"{type(error).__name__}: {error}"[:400],
                "usable": isinstance(error, NotImplementedError),
            }
        write(answers, **answer)
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
