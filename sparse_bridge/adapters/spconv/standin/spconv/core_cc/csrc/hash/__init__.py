"""The hash table's module."""

from spconv.core_cc.csrc.hash import core as core
