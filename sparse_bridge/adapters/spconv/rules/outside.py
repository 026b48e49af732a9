"""A warning for rows outside of the grid: a grid that is one cell too small costs a network its
border without an error."""

from __future__ import annotations

import logging

import torch

from .... import log, policy, state
from ....core.geometry.boxes import Box
from ....core.geometry.outside import Outside, OutsideLook
from ....core.maps.map_cache import MapStore


class _Watch:
    """looks: that were taken.  look: the one whose result was not read yet."""

    def __init__(self) -> None:
        self.looks = policy.Attempts(policy.OUTSIDE_LOOKS)
        self.look: OutsideLook | None = None


_watch = _Watch()


@state.owns
def reset() -> None:
    """Look again, and warn again."""
    global _watch
    _watch = _Watch()


def warn_of_rows_outside(store: MapStore, indices: torch.Tensor, box: Box) -> None:
    """Warn once of rows of indices [N, 1 + nd] outside of the grid `box`, unless their batch index
    is negative.

    store: of maps over `indices`, one of which was just built: it knows whether rows are dead. The
    device is never waited for; its answer is read when a later map is built.
    """
    watch = _watch
    if watch.look is None:
        cmap = None if watch.looks.over else store.find(box)
        if cmap is None or not cmap.checked or cmap.alive is None:
            return
        if indices.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        watch.looks.due()
        watch.look = OutsideLook(indices, box)
    if watch.look.ready:
        look, watch.look = watch.look, None
        if (outside := look.result()) is not None:
            watch.looks.give_up()
            _warn(outside, look.box)


def _warn(outside: Outside, box: Box) -> None:
    batch, *site = outside.site
    text = (
        f"row {outside.row} of a SparseConvTensor is at {site} in batch item {batch}, outside of "
        f"its grid {list(box.size[1:])} with {box.size[0]} batch items ({outside.n_outside} rows are "
        "outside). Such rows meet nothing but themselves; spconv takes them for other cells. Pass "
        "a larger spatial_shape (maximum + 1) or batch_size, or correct the indices."
    )
    if log.once(("spconv-rows-outside",), text, logging.WARNING):
        log.warn(text, RuntimeWarning)
