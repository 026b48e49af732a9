"""Symbolic tracing by torch.fx: sparse layers become one node each, containers their children."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.fx import Proxy


def proxy_in(values: Iterable[Any]) -> Proxy | None:
    """The first proxy among arguments, or in lists, tuples and dicts of them."""
    for proxy in _proxies(values):  # torch 2.8 does not trace `next` with a default
        return proxy
    return None


def _proxies(values: Iterable[Any]) -> Iterator[Proxy]:
    for value in values:
        if isinstance(value, Proxy):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _proxies(value)
        elif isinstance(value, dict):
            yield from _proxies(value.values())


def as_node(module: nn.Module, proxy: Proxy, *args: Any) -> Any:
    """The call of `module` as one node of the trace that `proxy` belongs to."""
    tracer: Any = proxy.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def one_node(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that a trace shows as one node, whichever tracer asks."""

    @functools.wraps(forward)
    def traced(self: nn.Module, *args: Any) -> Any:
        proxy = proxy_in(args)
        return forward(self, *args) if proxy is None else as_node(self, proxy, *args)

    return traced


def sequential(
    children: Sequence[nn.Module], x: Proxy, takes_sparse: Callable[[nn.Module], bool], convolution: Any
) -> Any:
    """`SparseSequential` on a proxy. Ordinary modules act on the features.

    Tracers that prepare quantisation look for a norm and an activation right behind a convolution,
    and fuse what they find: there these modules are called on the convolution's own result.
    """
    dense, behind, fuses = False, False, _quantises(x)
    for module in children:
        norm = "BatchNorm" in type(module).__name__
        fusible = behind and (norm or type(module) is nn.ReLU)
        if takes_sparse(module) or dense or fusible:
            x = module(x)
        else:
            x = x.replace_feature(module(x.features))
        dense = dense or type(module).__name__ == "ToDense"
        behind = fuses and (isinstance(module, convolution) or (fusible and norm))
    return x


def _quantises(x: Proxy) -> bool:
    tracers = sys.modules.get("torch.ao.quantization.fx.tracer")
    return tracers is not None and isinstance(x.tracer, tracers.QuantizationTracer)
