"""A network of spconv that is called again and again, for events between its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.core.maps.rulebook import Rulebook
from tests.clouds import cloud
from tests.native.recording import Recorder, remembered

COORDS, SHAPE = cloud((8, 9, 10)), [8, 9, 10]
Event = Callable[["World"], None]
EVENTS: dict[str, Event] = {}


class Net(nn.Module):
    """A layer with its norm and activation, a residual block, and a layer with all in one."""

    def __init__(self, sp: Any, bias: bool, width: int = 16) -> None:
        super().__init__()

        def conv(**more: Any) -> Any:
            return sp.SubMConv3d(width, width, 3, bias=bias, indice_key="a", **more)

        self.conv1, self.conv2, self.conv3, self.conv4 = conv(), conv(), conv(), conv()
        self.norm1, self.norm2, self.norm3 = [nn.BatchNorm1d(width, eps=1e-3) for _ in range(3)]
        self.relu = nn.ReLU()
        self.conv4.act_type = sp_activation(sp)
        self.last = sp.SubMConv3d(width, width, 1)

    def forward(self, x: Any) -> Any:
        def then(y: Any, *layers: Any) -> Any:
            for layer in layers:
                y = y.replace_feature(layer(y.features))
            return y

        y = then(self.conv1(x), self.norm1, self.relu)
        z = then(self.conv2(y), self.norm2, self.relu)
        z = then(self.conv3(z), self.norm3)
        z = then(z.replace_feature(z.features + y.features), self.relu)
        return self.conv4(z)


def sp_activation(sp: Any) -> Any:
    import importlib

    return importlib.import_module("spconv.constants") and sp.ops.tv.gemm.Activation.ReLU


class World:
    """A network on a GPU that is not there, and what is recorded of it."""

    def __init__(self, sp: Any, recorder: Recorder, bias: bool) -> None:
        torch.manual_seed(2)
        self.sp, self.recorder = sp, recorder
        self.net = Net(sp, bias).eval()
        self.features = torch.randn(len(COORDS), 16)
        self.x = sp.SparseConvTensor(self.features, COORDS, SHAPE, 2)
        with torch.no_grad(), settings.override(dataflow="per_offset"):
            self.x.indice_dict = self.net.conv1(self.x).indice_dict
        self.book: Rulebook = self.x.indice_dict["a"]._map.rulebook
        self.book.table(0)
        recorder.name(self.net)

    def __call__(self, times: int = 1, x: Any = None) -> None:
        for _ in range(times):
            self.tell(lambda: self.net(self.x if x is None else x))

    def tell(self, run: Callable[[], Any]) -> Any:
        made = self.recorder.tell(run)
        self.recorder.lines.append(remembered(self.net))
        return made

    def over(self, features: Any) -> Any:
        return self.x.replace_feature(features)


def event(run: Event) -> Event:
    EVENTS[run.__name__] = run
    return run
