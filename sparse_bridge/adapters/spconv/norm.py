"""`SparseSequential`: children in order, with layers fused where nobody could notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from ... import hooks
from ...core.conv.deferred import ProfiledFeatures
from ...core.conv.epilogue import Epilogue
from .. import fusion
from ..steps import Steps
from ..training_norms import left_out
from ..warmup_registry import Expected
from . import tracing
from .conv import convolved, expected


def run_sequential(
    children: Sequence[Any],
    x: Any,
    takes_sparse: Callable[[nn.Module], bool],
    tensor: Any,
    convolution: tuple[type[nn.Module], Steps],
) -> Any:
    """What a container's forward returns.

    takes_sparse: whether a child takes the sparse tensor itself; the others act on its features,
    if there are any rows.  tensor: the framework's SparseConvTensor.  convolution: its
    SparseConvolution, with the steps of its forward.
    """
    if isinstance(x, Proxy):
        return tracing.sequential(children, x, takes_sparse, convolution[0])
    fusing = (hooks.inference() and not hooks.torch_replaced()) or hooks.compiled_inference()
    index, count = 0, len(children)
    while index < count:
        module = children[index]
        index += 1
        if takes_sparse(module):
            layers = None
            if fusing and isinstance(module, convolution[0]) and _bare(module, convolution[1], x):
                layers = fusion.epilogue_after(children, index)
            if layers is None:
                x = module(x)
            else:
                weight, bias = hooks.parameters_of(module, "weight")
                epilogue = layers.epilogue(bias)
                names = module.name, module._sparse_unique_name
                x = convolved(module, x, weight, epilogue, names)
                index += layers.length()
        elif isinstance(x, tensor):
            if hooks.traced() or x.indices.shape[0] != 0:  # a graph holds the layers
                features = x.features
                if type(features) is ProfiledFeatures:  # the norm behind it is known here
                    features = features.plain
                if hooks.traced():
                    y, done = fusion.traced_norm(children, index - 1, features)
                    x, index = x.replace_feature(y), index + done - 1
                    continue
                fused = fusion.fusible_norm(children, index - 1, features)
                if fused:
                    x = x.replace_feature(fusion.batch_norm_training(module, features, fused == 2))
                    index += fused - 1
                else:
                    x = x.replace_feature(module(features))
            else:
                x = x.replace_feature(left_out(module, x.features))
        else:
            x = module(x)
    return x


def _bare(module: Any, steps: Steps, x: Any) -> bool:
    """A convolution in eval mode that nothing watches and whose call would add nothing."""
    return (
        not module.training
        and hooks.plain(module)
        and steps.overridden(module) is None
        and not module.conv1x1
        and getattr(module.act_type, "name", "None_") == "None_"
        and not getattr(x, "benchmark", True)
    )


def expected_of(container: Any) -> Iterator[Expected]:
    """What a `SparseSequential` will ask the engine to multiply: the products that end in a norm
    and activation of its own, or that a norm in training takes."""
    children = list(container.children())
    for following, child in enumerate(children, 1):
        if getattr(child, "conv1x1", True):
            continue
        if torch.is_grad_enabled():
            norm = fusion.training_norm_after(children, following)
            if norm is not None:
                yield expected(child, Epilogue(child.bias), norm)
            continue
        layers = fusion.epilogue_after(children, following)
        if layers is not None and not child.training:
            yield expected(child, layers.epilogue(child.bias))
