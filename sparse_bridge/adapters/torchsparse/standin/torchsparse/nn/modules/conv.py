"""The convolution layer. It holds parameters and geometry; `nn.functional.conv3d` does the work."""

import math

import torch
from torch import nn
from torchsparse.nn import functional as F
from torchsparse.nn.functional.conv.conv import conv3d
from torchsparse.nn.functional.conv.kmap import (
    build_kernel_map,
    convert_transposed_out_in_map,
    spdownsample,
    spupsample_generative,
    transpose_kernel_map,
)
from torchsparse.utils.utils import make_ntuple

from sparse_bridge.adapters.channels import check_channels
from sparse_bridge.adapters.torchsparse import profile
from sparse_bridge.adapters.torchsparse.conv import convolve, expected
from sparse_bridge.adapters.torchsparse.signatures import layer_arguments
from sparse_bridge.adapters.torchsparse.spec import spec_of
from sparse_bridge.adapters.warmup_registry import expect
from sparse_bridge.errors import ContractError

__all__ = ["Conv3d"]


class Conv3d(nn.Module):
    """A sparse convolution with parameters `kernel` [V, C_in, C_out] and `bias` [C_out] or None.

    2.1: (in_channels, out_channels, kernel_size=3, stride=1, padding=0, dilation=1, bias=False,
    transposed=False, generative=False, config=None). Up to 2.0: (in_channels, out_channels,
    kernel_size=3, stride=1, dilation=1, bias=False, transposed=False), and config in 2.0.
    A kernel of volume 1 is [C_in, C_out] (2.1: only without a stride).
    """

    def __init__(self, in_channels, out_channels, kernel_size=3, stride=1, *args, **kwargs):
        super().__init__()
        arguments = layer_arguments(args, kwargs)
        release = profile.peek()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = make_ntuple(kernel_size, ndim=3)
        self.stride = make_ntuple(stride, ndim=3)
        self.dilation = arguments.get("dilation", 1)
        self.transposed = arguments.get("transposed", False)
        self.generative = arguments.get("generative", False)
        if self.generative and not self.transposed:
            raise ContractError("generative=True is for transposed layers; set transposed=True.")
        self.padding = tuple(
            (k - 1) // 2 if k % 2 and s == 1 else p
            for k, s, p in zip(
                self.kernel_size, self.stride, make_ntuple(arguments.get("padding", 0), ndim=3), strict=True
            )
        )
        check_channels({"in_channels": in_channels, "out_channels": out_channels})
        spec_of(self.kernel_size, self.stride, self.padding, self.dilation, self.transposed, self.generative)
        self._config = arguments.get("config")
        if release.name == "2.0" and self._config is None:
            self._config = {"epsilon": 0.0, "mm_thresh": 0, "kmap_mode": "hashmap"}
        self.kernel_volume = math.prod(self.kernel_size)
        matrix = self.kernel_volume == 1 and (not release.divides or math.prod(self.stride) == 1)
        shape = (in_channels, out_channels)
        self.kernel = nn.Parameter(torch.zeros(*(shape if matrix else (self.kernel_volume, *shape))))
        if arguments.get("bias", False):
            self.bias = nn.Parameter(torch.zeros(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        expect(self, expected)

    @property
    def config(self):
        """The name of `_config` in 2.0."""
        return self._config

    @config.setter
    def config(self, value):
        self._config = value

    def extra_repr(self):
        text = "{in_channels}, {out_channels}, kernel_size={kernel_size}"
        if self.stride != (1, 1, 1):
            text += ", stride={stride}"
        if self.dilation not in (1, (1, 1, 1)):
            text += ", dilation={dilation}"
        if self.bias is None:
            text += ", bias=False"
        if self.transposed:
            text += ", transposed=True"
        if self.generative:
            text += ", generative=True"
        return text.format(**self.__dict__)

    def reset_parameters(self):
        """Uniform in +-1 / sqrt(fan V), fan = C_out in a transposed layer, C_in otherwise."""
        fan = (self.out_channels if self.transposed else self.in_channels) * self.kernel_volume
        bound = 1 / math.sqrt(fan) if fan else 0.0
        with torch.no_grad():
            self.kernel.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def convolves_alone(self):
        """Whether `forward` is a convolution of ours and nothing else."""
        return type(self).forward is _FORWARD and _ours()

    def arguments(self):
        """What `convolve` takes: kernel, bias, spec, config."""
        state = self.__dict__  # a pickle of another release lacks some
        parameters, kind = self._parameters, type(self)  # as `hooks.parameters_of`, without a call
        if "kernel" not in parameters or "bias" not in parameters or hasattr(kind, "kernel") or hasattr(kind, "bias"):
            kernel, bias = self.kernel, self.bias
        else:
            kernel, bias = parameters["kernel"], parameters["bias"]
        spec = spec_of(
            self.kernel_size,
            self.stride,
            state.get("padding", 0),
            self.dilation,
            self.transposed,
            state.get("generative", False),
        )
        return kernel, bias, spec, state.get("_config", state.get("config"))

    def forward(self, input):
        if not _ours():
            return self._elsewhere(input)
        return convolve(input, *self.arguments())

    def _elsewhere(self, input):
        """Through the function that somebody has put in the place of `F.conv3d`; ours refuses other steps."""
        state = self.__dict__
        padding, generative = state.get("padding", 0), state.get("generative", False)
        config = state.get("_config", state.get("config"))
        options = {"bias": self.bias, "stride": self.stride, "dilation": self.dilation}
        options["transposed"] = self.transposed
        release = profile.peek()
        if release.divides:
            options |= {"padding": padding, "config": config, "generative": generative}
            options["training"] = self.training
        elif release.name == "2.0" and config is not None:
            options |= config
        return F.conv3d(input, self.kernel, self.kernel_size, **options)


def _ours():
    """Whether nobody has replaced `F.conv3d`, or what the original's goes through."""
    return (
        F.conv3d is conv3d
        and F.build_kernel_map is build_kernel_map
        and F.spdownsample is spdownsample
        and F.spupsample_generative is spupsample_generative
        and F.transpose_kernel_map is transpose_kernel_map
        and F.convert_transposed_out_in_map is convert_transposed_out_in_map
    )


_FORWARD = Conv3d.forward  # programs may put another one there
