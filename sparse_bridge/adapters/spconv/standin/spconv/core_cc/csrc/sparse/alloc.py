"""The base class of allocators."""

from sparse_bridge.adapters.spconv.upstream.allocator import ExternalAllocator as ExternalAllocator
