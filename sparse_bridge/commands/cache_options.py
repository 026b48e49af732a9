"""Options of `python -m sparse_bridge cache`, which are read before torch is imported."""

from __future__ import annotations

import argparse
from typing import Any

_SUMMARY = "show or clear what tuning has stored"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `cache` command; `args.func` becomes `cache.run_show` or `run_clear`."""
    parser = subparsers.add_parser("cache", help=_SUMMARY, description=_SUMMARY)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what is stored, and what comes with the package")
    show.add_argument("--buckets", action="store_true", help="every tuned tile")
    show.add_argument("--json", action="store_true", help="machine-readable output")
    show.set_defaults(func=_show)
    clear = actions.add_parser("clear", help="delete what is stored; Triton's own cache of compiled kernels stays")
    clear.add_argument("--stale", action="store_true", help="only what this version does not read any more")
    clear.add_argument("--json", action="store_true", help="machine-readable output")
    clear.set_defaults(func=_clear)
    return parser


def _show(args: argparse.Namespace) -> int:
    from . import cache

    return cache.run_show(args)


def _clear(args: argparse.Namespace) -> int:
    from . import cache

    return cache.run_clear(args)
