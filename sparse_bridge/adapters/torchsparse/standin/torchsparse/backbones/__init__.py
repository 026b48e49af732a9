"""Networks of torchsparse 2.x."""

from . import modules, resnet, unet
from .resnet import SparseResNet21D
from .unet import SparseResUNet42

__all__ = ["SparseResNet21D", "SparseResUNet42", "modules", "resnet", "unet"]
