"""Colours of the pictures: people who see fewer of them tell them apart as well."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from sparse_bridge.tools.demo.segmentation import CLASSES, COLOURS

from .launch import ENVIRONMENT, ROOT

# What is left of linear red, green and blue: Machado, Oliveira and Fernandes, "A Physiologically-
# based Model for Simulation of Color Vision Deficiency", 2009, severity 1.
SIGHT = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_APART = 17.0  # distance in CIE Lab; some 2 are seen side by side, and panels lie apart
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    """A colour such as "#3f5f9e" as it is seen, in CIE Lab."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = _XYZ @ np.clip(sight @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def closest(colours: dict[str, str], sight: np.ndarray) -> tuple[float, str, str]:
    seen = {name: lab(colour, sight) for name, colour in colours.items()}
    return min(
        (float(np.linalg.norm(seen[one] - seen[other])), one, other)
        for one, other in itertools.combinations(colours, 2)
    )


@pytest.fixture(scope="module")
def palettes() -> dict[str, dict[str, str]]:
    """By picture: {what: colour}."""
    code = """
import json, sys
sys.path.insert(0, "examples")
import box_view, generation
boxes = {name: look["color"] for name, look in box_view.BOXES.items()}
curves = {str(at): look["color"] for at, look in box_view.CURVES.items()}
print(json.dumps({"boxes": boxes, "curves": curves, "generation": generation.COLOURS}))
"""
    code = "import sparse_bridge; sparse_bridge.enable('spconv')" + code
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return {"classes": dict(zip(CLASSES, COLOURS, strict=True)), **json.loads(done.stdout)}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("picture", ["classes", "boxes", "curves", "generation"])
def test_colours_of_a_picture_differ_for_everybody(palettes, picture, sight) -> None:
    distance, *pair = closest(palettes[picture], SIGHT[sight])
    assert distance > _APART, pair


def test_the_measure_finds_red_and_green() -> None:
    """What these pictures used to tell right from wrong."""
    colours = {"right": "#2ca02c", "wrong": "#d6604d"}
    assert closest(colours, SIGHT["all colours"])[0] > 80
    assert closest(colours, SIGHT["deuteranopia"])[0] < 40
