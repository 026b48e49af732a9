"""A small torchsparse as an installed one would be: its own classes, which call `F.conv3d`.

Written from the contract for tests of the patches; its convolution only says that it ran.
"""

from __future__ import annotations

import textwrap

FILES = {
    "__init__.py": """
        from .version import __version__
        from .tensor import SparseTensor
        from . import nn, utils
    """,
    "version.py": "__version__ = {version!r}",
    "tensor.py": """
        from .caches import TensorCache

        class SparseTensor:
            def __init__(self, feats, coords, stride=1, *more):
                self.feats, self.coords = feats, coords
                self.stride = (stride,) * 3 if isinstance(stride, int) else tuple(stride)
                if {new}:
                    self.spatial_range = more[0] if more else None
                    self._caches = TensorCache()
                else:
                    self.cmaps, self.kmaps = {{}}, {{}}

            F = property(lambda self: self.feats)
            C = property(lambda self: self.coords)

            def dense(self):
                raise NotImplementedError
    """,
    "caches.py": """
        class TensorCache:
            def __init__(self):
                self.cmaps, self.kmaps, self.hashmaps = {{}}, {{}}, {{}}
    """,
    "nn/__init__.py": "from . import functional\nfrom .modules import *",
    "nn/functional/__init__.py": """
        from .conv import conv3d
        from .points import sphash, sphashquery, spcount, spvoxelize, spdevoxelize
    """,
    "nn/functional/conv.py": """
        def conv3d(input, weight, kernel_size, *args, **kwargs):
            return ("original", args, kwargs)
    """,
    "nn/functional/points.py": "\n".join(
        f"def {name}(*args): return 'original'"
        for name in ("sphash", "sphashquery", "spcount", "spvoxelize", "spdevoxelize")
    ),
    "nn/modules.py": """
        import torch
        from torch import nn
        from torchsparse.nn import functional as F

        class BatchNorm(nn.BatchNorm1d):
            def forward(self, input):
                from torchsparse.tensor import SparseTensor
                output = SparseTensor(super().forward(input.feats), input.coords, input.stride)
                if {new}:
                    output.spatial_range, output._caches = input.spatial_range, input._caches
                else:
                    output.cmaps, output.kmaps = input.cmaps, input.kmaps
                return output

        class Conv3d(nn.Module):
            def __init__(self, a, b, kernel_size=3, stride=1, transposed=False):
                super().__init__()
                self.kernel_size, self.stride = (kernel_size,) * 3, (stride,) * 3
                self.transposed = transposed
                self.kernel = nn.Parameter(torch.randn(kernel_size ** 3, a, b) / 9)

            def forward(self, input):
                more = {{"training": self.training, "config": None, "padding": (0, 0, 0)}}
                if self.stride == (1, 1, 1):
                    more["padding"] = tuple(k // 2 for k in self.kernel_size)
                return F.conv3d(
                    input, self.kernel, kernel_size=self.kernel_size, bias=None,
                    stride=self.stride, dilation=1, transposed=self.transposed,
                    **(more if {new} else {{}}),
                )
    """,
    "utils/__init__.py": """
        def to_dense(feats, coords, spatial_range):
            raise NotImplementedError
    """,
}


def write(folder, version):
    """The package under `folder`."""
    for name, text in FILES.items():
        path = folder / "torchsparse" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(text).strip() + "\n"
        if "{" in text:
            text = text.format(version=version, new=version.startswith("2.1"))
        path.write_text(text)
