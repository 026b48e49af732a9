"""Whether a process may time anything: a rank that does keeps the others waiting."""

from __future__ import annotations

import logging

import torch

from ... import log

__all__ = ["one_of_several"]


def one_of_several() -> bool:
    """Whether this process is a rank among others: what it times would be its own, and the others
    would wait in a collective meanwhile. Says so once."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    several = distributed.get_world_size() > 1
    if several:
        log.once(
            ("tuner", "distributed"),
            "SPARSE_BRIDGE_TUNE=full tunes nothing in a process group of several ranks, which all "
            "take the tiles that are stored. `python -m sparse_bridge warm --tune` stores some.",
            logging.WARNING,
        )
    return several
