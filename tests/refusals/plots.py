"""Refused pictures and refused input of `locality`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from molflt import plots
from molflt.attention.positions.rotary import RotaryPosition
from molflt.metrics import locality
from refusals import Refusal


def refused(
    draw: Callable[[Path], object], option: str, expected: str = "", got: str = ""
) -> Refusal:
    """Returns a row for a picture; a refused one is not written."""

    def call(folder: Path) -> None:
        try:
            draw(folder / "a.png")
        finally:
            assert not (folder / "a.png").exists()

    return Refusal(call, option, expected, got)


def attention(weights: Any, **options: Any) -> Callable[[Path], object]:
    return lambda png: plots.attention_matrices(weights, png, **options)


def local(weights: Any, distances: Any, option: str, got: str = "", **options: Any) -> Refusal:
    return Refusal(lambda _: locality(weights, distances, **options), option, "", got)


ONES, EYE = np.ones((2, 3, 3)), np.eye(3)
APART = np.abs(np.arange(3)[:, None] - np.arange(3)).astype(float)
PAIR = {"val_id": (np.zeros(3), np.ones(3))}
ROWS = [
    refused(attention(ONES[0]), "weights", "(heads, queries, keys)", "(3, 3)"),
    refused(attention(ONES, scale="ln"), "scale", "auto, linear, log", "'ln'"),
    refused(lambda png: plots.rpe_curves(RotaryPosition(8), png, 4), "logits", "", "Rotary"),
    refused(lambda png: plots.parity(PAIR, png.with_suffix(".gif")), "a.gif", ".svg"),
    local(EYE, np.zeros((4, 4)), "distances", "(4, 4)"),
    local(2 * EYE, APART, "sum to 1", "2.0"),
    local(EYE, APART + np.diag([np.inf, 0, 0]), "masked", "1.0"),
]
