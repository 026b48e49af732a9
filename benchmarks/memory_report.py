"""The table of docs/memory.md from a record of `benchmarks.memory`: `python -m benchmarks.memory_report FILE`."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

__all__ = ["limits_table"]

HEAD = (
    "level, API, MLP",
    "no limit: peak, of it layers, ms",
    "lowest that the layers pass: limit, ms",
    "the error there names",
    "lowest that a program passes: limit, ms",
)
APIS = {"flex_gemm": "FlexGEMM", "spconv": "spconv"}
MLPS = {"whole": "whole", "cut": "in parts", "none": "none"}


def limits_table(rows: list[dict[str, Any]]) -> str:
    """One line a network: its peak, and the lowest limits under which its convolutions and all of it run.

    A row with `least_of_layers_mib` is a limit under which a convolution was refused; one with
    `least_of_process_mib`, one under which other operations took more.
    """
    networks: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        networks.setdefault((row["level"], row["api"], row["mlp"]), []).append(row)
    lines = [HEAD, ("---",) * len(HEAD)]
    for (level, api, mlp), found in networks.items():
        (free,) = [row for row in found if row["limit_mib"] is None]
        ran = sorted(
            (row for row in found if row["limit_mib"] and "least_of_layers_mib" not in row),
            key=lambda row: row["limit_mib"],
        )
        layers, passes = ran[0], next(row for row in ran if "least_of_process_mib" not in row)
        refusal = layers.get("least_of_process_mib")
        lines.append(
            (
                f"{level}, {APIS[api]}, {MLPS[mlp]}",
                f"{free['allocated_mib']:,.0f}, {free['convolutions_mib']:,.0f}, {free['ms']:,.0f}",
                f"{layers['limit_mib']:,.0f}, {layers['ms']:,.0f}",
                f"{refusal:,.0f}" if refusal else "no error",
                f"{passes['limit_mib']:,.0f}, {passes['ms']:,.0f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path, metavar="FILE")
    print(limits_table(json.loads(parser.parse_args().file.read_text())["rows"]))


if __name__ == "__main__":
    main()
