"""Export hooks of Lidar_AI_Solution: `SparseConvolution.forward` replaced, all layers noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import spconv.pytorch as spconv
import torch
from cumm import tensorview as tv
from spconv.core import ConvAlgo
from spconv.pytorch import conv
from spconv.pytorch.conv import SparseConvolution, SparseConvTensor
from torch import nn

from .blocks import by_site, columns
from .centerpoint import SpMiddleResNetFHD, batch

__all__ = ["batch", "build", "outputs"]

ACTIVATIONS = {
    tv.gemm.Activation.None_: "None",
    tv.gemm.Activation.ReLU: "ReLU",
    tv.gemm.Activation.Sigmoid: "Sigmoid",
    tv.gemm.Activation.LeakyReLU: "LeakyReLU",
}
PRECISIONS = {
    ConvAlgo.Native: "native",
    ConvAlgo.MaskImplicitGemm: "implicit",
    ConvAlgo.MaskSplitImplicitGemm: "implicit-split",
}
NODES: list[dict[str, Any]] = []


def describe(layer: Any, x: Any, y: Any) -> dict[str, Any]:
    """A node of the exported graph."""
    names = (
        "ndim",
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "transposed",
        "inverse",
        "output_padding",
        "groups",
        "subm",
        "indice_key",
        "act_alpha",
        "act_beta",
        "name",
        "_sparse_unique_name",
    )
    node = {name: getattr(layer, name) for name in names}
    node["activation"] = ACTIVATIONS[layer.act_type]
    node["algo"] = PRECISIONS[layer.algo]
    node["input_spatial_shape"] = x.spatial_shape
    node["output_spatial_shape"] = y.spatial_shape
    return node


def expected_shape(layer: Any, x: Any) -> list[int]:
    """The grid that the deployed layer will give."""
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    if layer.subm:
        return x.spatial_shape
    if layer.transposed:
        return spconv.ops.get_deconv_output_size(x.spatial_shape, *geometry, layer.output_padding)
    return spconv.ops.get_conv_output_size(x.spatial_shape, *geometry)


def export_forward(self: Any, input: SparseConvTensor, add_input: Any = None) -> Any:
    """In place of `SparseConvolution.forward`."""
    input._features = input.features.contiguous()
    output = self._conv_forward(
        self.training,
        input,
        self.weight,
        self.bias,
        add_input,
        name=self.name,
        sparse_unique_name=self._sparse_unique_name,
        act_type=self.act_type,
        act_alpha=self.act_alpha,
        act_beta=self.act_beta,
    )
    assert output.spatial_shape == expected_shape(self, input)
    NODES.append(describe(self, input, output))
    return output


def export_repr(self: Any) -> str:
    return f"{type(self).__name__}[{self.in_channels}>{self.out_channels}, {self.act_type}]"


@contextlib.contextmanager
def hooks() -> Iterator[list[dict[str, Any]]]:
    """Both methods replaced while the graph is traced."""
    kept = conv.SparseConvolution.forward, conv.SparseConvolution.__repr__
    NODES.clear()
    conv.SparseConvolution.forward = export_forward
    conv.SparseConvolution.__repr__ = export_repr
    try:
        yield NODES
    finally:
        conv.SparseConvolution.forward, conv.SparseConvolution.__repr__ = kept


class QuantConvolution(SparseConvolution):
    """What the QAT tool puts in a layer's place: the same layer, its activation fused."""

    @classmethod
    def of(cls, layer: SparseConvolution, act_type: Any) -> QuantConvolution:
        made = cls(
            layer.ndim,
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            True,
            layer.subm,
            layer.output_padding,
            layer.transposed,
            layer.inverse,
            layer.indice_key,
            layer.algo,
            act_type=act_type,
        )
        made.weight = layer.weight
        if layer.bias is not None:
            made.bias = layer.bias
        else:
            nn.init.zeros_(made.bias)
        return made.train(layer.training)


def fold(layer: Any, norm: nn.BatchNorm1d) -> None:
    """Put a batch norm's scale and shift into a layer that has a bias."""
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    shape = [-1, *[1] * (layer.weight.dim() - 1)]
    layer.weight.data = layer.weight.data * scale.view(shape)
    layer.bias.data = (layer.bias.data - norm.running_mean) * scale + norm.bias


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Convolution, norm and ReLU of every container become one layer; blocks keep their ReLU."""
    for parent in model.modules():
        children = dict(parent.named_children())
        if isinstance(parent, spconv.SparseSequential):
            names = list(children)
            for first, second, third in zip(names, names[1:], names[2:], strict=False):
                if isinstance(children[first], SparseConvolution):
                    relu = tv.gemm.Activation.ReLU
                    layer = QuantConvolution.of(children[first], relu)
                    fold(layer, children[second])
                    parent._modules.update({first: layer, second: nn.Identity(), third: nn.Identity()})
        elif "conv1" in children and "bn1" in children:
            for number in (1, 2):
                layer = QuantConvolution.of(children[f"conv{number}"], tv.gemm.Activation.None_)
                fold(layer, children[f"bn{number}"])
                parent._modules.update({f"conv{number}": layer, f"bn{number}": nn.Identity()})


class Exporter(nn.Module):
    """CenterPoint's encoder, fused, traced while it runs."""

    def __init__(self, num_input_features: int):
        super().__init__()
        self.scn = SpMiddleResNetFHD(num_input_features)
        fuse(self.scn.eval())

    def forward(self, features: torch.Tensor, coors: torch.Tensor, *rest: Any) -> dict[str, Any]:
        with hooks() as nodes:
            spatial, stages = self.scn(features, coors, *rest)
            graph = list(nodes)
            text = repr(self.scn.conv1)
        return {"spatial": spatial, "stages": stages, "graph": graph, "text": text}


def build(num_input_features: int = 5) -> nn.Module:
    return Exporter(num_input_features)


def outputs(result: dict[str, Any]) -> list[torch.Tensor]:
    return [columns(result["spatial"]), *(by_site(x) for x in result["stages"])]
