"""The libraries that are compared, behind one small interface.

Each runs in a process of its own: the stand-in answers the names of the library it replaces, and
two builds of one library do not load together.
"""

from __future__ import annotations

import abc
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import torch
from torch import nn

from sparse_bridge.tools.networks import minkowski, torchsparse
from sparse_bridge.tools.networks.spconv import ResidualUNet, Second, norm

from .workloads import Scan

__all__ = ["NETWORKS", "PEERS", "Peer", "installed", "load"]

NETWORKS = {"second": Second, "unet": ResidualUNet}  # of spconv; the others have the second


class Peer(abc.ABC):
    """How one library spells a layer, a tensor, and the reuse of a kernel map.

    `api`: peers of one API get equal weights, so their results can be compared.
    """

    api: str

    def __init__(self, name: str, package: str):
        self.name, self.package = name, package

    @abc.abstractmethod
    def layer(self, channels: int, bias: bool = True) -> nn.Module:
        """A 3x3x3 submanifold convolution."""

    def block(self, channels: int) -> nn.Module:
        """That layer without bias, norm and ReLU in the library's own sequential container."""
        raise NotImplementedError(f"{self.name} has no sequential container")

    def network(self, name: str) -> nn.Module:
        """One of `NETWORKS`, or of torchsparse's `BACKBONES`."""
        raise NotImplementedError(f"no {name} in the API of {self.name}")

    def for_inference(self, model: nn.Module) -> nn.Module:
        """What a user does to a network in eval mode before running it often."""
        return model

    def for_training(self, model: nn.Module) -> nn.Module:
        """The same before training it."""
        return model

    @abc.abstractmethod
    def maps(self, layer: nn.Module, feats: torch.Tensor, scan: Scan) -> Any:
        """Run `layer`; returns what `call` needs in order to reuse the kernel map."""

    @abc.abstractmethod
    def call(self, layer: nn.Module, feats: torch.Tensor, scan: Scan, maps: Any = None) -> torch.Tensor:
        """Output features [N, C] of a layer, block or network on a new sparse tensor; without
        `maps` every kernel map is built."""

    def allow_tf32(self, allowed: bool) -> None:
        """TF32 for fp32 products, or IEEE."""
        torch.backends.cuda.matmul.allow_tf32 = allowed

    def forget(self) -> None:
        """Drop what was learnt from earlier calls, so that the next case begins like the first."""
        bridge = sys.modules.get("sparse_bridge.core.prefetch.prefetch")
        if bridge is not None:
            bridge.forget()

    def fans(self, weight: torch.Tensor) -> tuple[int, int]:
        """(C_in, kernel volume) of a weight."""
        c_out, c_in = weight.shape[0], weight.shape[-1]
        return c_in, weight.numel() // (c_in * c_out)

    def version(self) -> str:
        module = sys.modules[self.package]
        try:
            return str(getattr(module, "__version__", "")) or importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


class _Spconv(Peer):
    """`spconv.pytorch` and whatever has its names."""

    api = "spconv"

    def __init__(self, name: str, package: str):
        super().__init__(name, package)
        self.sp = importlib.import_module(f"{package}.pytorch")
        self.constants = importlib.import_module(f"{package}.constants")
        if name == "spconv":
            _let_cpu_gradients_run()

    def layer(self, channels, bias=True):
        return self.sp.SubMConv3d(channels, channels, 3, bias=bias, indice_key="k")

    def block(self, channels):
        return self.sp.SparseSequential(self.layer(channels, False), norm(channels), nn.ReLU())

    def network(self, name):
        return NETWORKS[name](self.sp) if name in NETWORKS else super().network(name)

    def _tensor(self, feats, coords, scan):
        return self.sp.SparseConvTensor(feats, coords, list(scan.shape), scan.batch_size)

    def maps(self, layer, feats, scan):
        return layer(self._tensor(feats, scan.coords, scan)).indice_dict

    def call(self, layer, feats, scan, maps=None):
        # A new tensor of coordinates, so that nothing found by its identity is reused.
        coords = scan.coords.clone() if maps is None else scan.coords
        x = self._tensor(feats, coords, scan)
        if maps is not None:
            x.indice_dict = dict(maps)
        return layer(x).features

    def allow_tf32(self, allowed):
        super().allow_tf32(allowed)
        self.constants.SPCONV_ALLOW_TF32 = allowed


class _Optimized(_Spconv):
    """The bridge after `sparse_bridge.optimize(model)`."""

    graphs = False

    def for_inference(self, model):
        import sparse_bridge

        return sparse_bridge.optimize(model, graphs=self.graphs)


class _Replayed(_Optimized):
    """The same, with whole inferences and training steps replayed from captured graphs."""

    graphs = True

    def for_training(self, model):
        return self.for_inference(model)


class _TorchSparse(Peer):
    """`torchsparse` 2.1: coordinates (batch, x, y, z), transposed layers reuse the map."""

    api = "torchsparse"

    def __init__(self, name: str, package: str):
        super().__init__(name, package)
        self.ts = importlib.import_module(package)
        importlib.import_module(f"{package}.nn")

    def layer(self, channels, bias=True):
        return self.ts.nn.Conv3d(channels, channels, 3, bias=bias)

    def block(self, channels):
        spnn = self.ts.nn
        return nn.Sequential(self.layer(channels, False), spnn.BatchNorm(channels), spnn.ReLU(True))

    def network(self, name):
        if name in torchsparse.BACKBONES:
            importlib.import_module(f"{self.package}.backbones")
            return torchsparse.Backbone(self.ts, name)
        return torchsparse.ResidualUNet(self.ts) if name == "unet" else super().network(name)

    def maps(self, layer, feats, scan):
        x = self.ts.SparseTensor(feats, scan.coords)
        layer(x)
        return x._caches

    def call(self, layer, feats, scan, maps=None):
        coords = scan.coords.clone() if maps is None else scan.coords
        x = self.ts.SparseTensor(feats, coords)
        if maps is not None:
            x._caches = maps
        return layer(x).feats

    def allow_tf32(self, allowed):
        super().allow_tf32(allowed)
        self.ts.backends.allow_tf32 = allowed

    def fans(self, weight):  # [C_in, C_out] or [V, C_in, C_out]
        return weight.shape[-2], weight.numel() // (weight.shape[-2] * weight.shape[-1])


class _Minkowski(Peer):
    """`MinkowskiEngine` 0.5; its manager of coordinates holds the maps."""

    api = "minkowski"

    def __init__(self, name: str, package: str):
        super().__init__(name, package)
        self.me = importlib.import_module(package)

    def layer(self, channels, bias=True):
        return self.me.MinkowskiConvolution(channels, channels, 3, bias=bias, dimension=3)

    def network(self, name):
        if name != "unet":
            return super().network(name)
        return minkowski.MinkUNet(self.me, in_channels=4)

    def maps(self, layer, feats, scan):
        x = self.me.SparseTensor(feats, coordinates=scan.coords)
        layer(x)
        return x

    def call(self, layer, feats, scan, maps=None):
        if maps is None:
            return layer(self.me.SparseTensor(feats, coordinates=scan.coords.clone())).F
        key, manager = maps.coordinate_map_key, maps.coordinate_manager
        x = self.me.SparseTensor(feats, coordinate_map_key=key, coordinate_manager=manager)
        return layer(x).F

    def fans(self, weight):  # [C_in, C_out] or [V, C_in, C_out]
        return weight.shape[-2], weight.numel() // (weight.shape[-2] * weight.shape[-1])


class _FlexGemm(Peer):
    """`flex_gemm`: submanifold layers alone, as functions."""

    api = "flexgemm"

    def __init__(self, name: str, package: str):
        super().__init__(name, package)
        self.ops = importlib.import_module(f"{package}.ops.spconv")
        self.config = importlib.import_module(f"{package}.kernels.triton.spconv.config")
        self.ops.set_algorithm(self.ops.Algorithm.MASKED_IMPLICIT_GEMM_SPLITK)

    def layer(self, channels, bias=True):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(channels, 3, 3, 3, channels))
                self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

        return Layer()

    def maps(self, layer, feats, scan):
        extent = torch.Size([scan.batch_size, feats.shape[1], *scan.shape])
        compute = self.ops.SubMConv3dFunction._compute_neighbor_cache
        return compute(scan.coords, extent, (3, 3, 3), (1, 1, 1), torch.is_grad_enabled())

    def call(self, layer, feats, scan, maps=None):
        maps = self.maps(layer, feats, scan) if maps is None else maps
        extent = torch.Size([scan.batch_size, feats.shape[1], *scan.shape])
        conv = self.ops.sparse_submanifold_conv3d
        return conv(feats, scan.coords, extent, layer.weight, layer.bias, maps)[0]

    def allow_tf32(self, allowed):
        super().allow_tf32(allowed)
        self.config.allow_tf32 = allowed


def _let_cpu_gradients_run() -> None:
    """The spconv wheel's CPU backward asks for a CUDA stream handle that it never uses."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("spconv") and hasattr(module, "get_current_stream"):
            module.get_current_stream = lambda: 0


# Dataflows that peers of their own force: none of the mask splits, one, two ...
_FORCED = ("unmasked", "masked", "masked:2", "masked:3", "masked:4", "grouped")
_STANDIN = {"mode": "standin"}
_FUSE = {**_STANDIN, "optimize": "fuse"}  # without replays
# name -> (interface, package, framework to bridge, and how: keywords of `enable`)
PEERS: dict[str, tuple[type[Peer], str, tuple[str, dict[str, Any]] | None]] = {
    "spconv": (_Spconv, "spconv", None),
    "bridge": (_Spconv, "spconv", ("spconv", _STANDIN)),
    "bridge_optimized": (_Optimized, "spconv", ("spconv", _STANDIN)),
    "bridge_replayed": (_Replayed, "spconv", ("spconv", _STANDIN)),
    "bridge_fuse": (_Spconv, "spconv", ("spconv", _FUSE)),
    "bridge_patch": (_Spconv, "spconv", ("spconv", {"mode": "patch"})),
    **{f"bridge_{flow.replace(':', '_')}": (_Spconv, "spconv", ("spconv", _STANDIN)) for flow in _FORCED},
    "spconv_triton": (_Spconv, "spconv_triton", None),
    "torchsparse": (_TorchSparse, "torchsparse", None),
    "bridge_torchsparse": (_TorchSparse, "torchsparse", ("torchsparse", _STANDIN)),
    "bridge_minkowski": (_Minkowski, "MinkowskiEngine", ("minkowski", _STANDIN)),
    "bridge_flexgemm": (_FlexGemm, "flex_gemm", ("flex_gemm", _STANDIN)),
    "flexgemm": (_FlexGemm, "flex_gemm", None),
}


def installed(name: str) -> bool:
    """Whether a peer's own package can be found; a stand-in needs none."""
    _, package, bridged = PEERS[name]
    return bool(bridged and bridged[1]["mode"] == "standin") or importlib.util.find_spec(package) is not None


def load(name: str) -> Peer:
    """Import a peer into this process.

    Raises:
        ImportError: its package is missing or cannot load here.
        SparseBridgeError: the bridge refuses; says why.
    """
    interface, package, bridged = PEERS[name]
    if bridged is not None:
        import sparse_bridge

        flow = name.removeprefix("bridge_").replace("_", ":")
        if flow in _FORCED:
            sparse_bridge.update_settings(dataflow=flow)
        sparse_bridge.enable(bridged[0], **bridged[1])
    return interface(name, package)
