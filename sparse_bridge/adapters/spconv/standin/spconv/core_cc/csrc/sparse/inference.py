"""Bias and activation, in place."""

from sparse_bridge.adapters.spconv.upstream.extension import InferenceOps as InferenceOps
