"""Refused pictures and refused input of `locality`."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from molflt import plots
from molflt.attention.positions.gaussian_bias import GaussianBias
from molflt.attention.positions.grid import ToeplitzPosition
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


def curve(text: str) -> Callable[[Path], object]:
    def draw(png: Path) -> None:
        table = png.with_suffix(".csv")
        table.write_text(text)
        plots.training_curve(table, png, {})

    return draw


def local(weights: Any, distances: Any, option: str, got: str = "", **options: Any) -> Refusal:
    return Refusal(lambda _: locality(weights, distances, **options), option, "", got)


ONES, EYE = np.ones((2, 3, 3)), np.eye(3)
APART = np.abs(np.arange(3)[:, None] - np.arange(3)).astype(float)
PAIR = {"val_id": (np.zeros(3), np.ones(3))}
GRID1 = ToeplitzPosition(2, max_tokens=7)
BARE = SimpleNamespace(stack=SimpleNamespace(position=None))
ROWS = [
    refused(attention(ONES[0]), "weights", "(heads, queries, keys)", "(3, 3)"),
    refused(attention(np.ones((2, 0, 3))), "weights", "non-empty", "(2, 0, 3)"),
    refused(attention([[[1.0, np.nan]]]), "weights", "finite", "1 of 2"),
    refused(attention(ONES, scale="ln"), "scale", "auto, linear, log", "'ln'"),
    refused(attention([[[1.5, -0.5]]], scale="log"), "scale", "at least 0", "-0.5"),
    refused(lambda png: plots.rpe_curves(RotaryPosition(8), png, 4), "logits", "", "Rotary"),
    refused(lambda png: plots.rpe_curves(GaussianBias(2), png, 4), "dimension 1", "", "of 3"),
    refused(lambda png: plots.rpe_surfaces(GRID1, png, 4), "dimension 2", "", "of 1"),
    refused(lambda png: plots.rpe_profiles(BARE, png), "rpe_profiles", "position", "without"),
    refused(lambda png: plots.parity(PAIR, png.with_suffix(".gif")), "a.gif", ".svg"),
    refused(curve("epoch,loss\n1,2\n"), "a.csv", "step", "epoch, loss"),
    refused(curve("step,lr,train_loss\n"), "a.csv", "train_loss"),
    refused(lambda png: plots.further_formats(["gif"]).__enter__(), "pictures", "svg", "'gif'"),
    local(EYE, np.zeros((4, 4)), "distances", "(4, 4)"),
    local(EYE, -APART, "distances"),
    local(EYE, APART, "fraction", "0.0", fraction=0.0),
    local(2 * EYE, APART, "sum to 1", "2.0"),
    local(np.full((3, 3), 1 / 3), APART, "causal", "0.333", causal=True),
    local(EYE, APART + np.diag([np.inf, 0, 0]), "masked", "1.0"),
    local(EYE[:, :2], APART[:, :2], "query 0", "none", causal=True),
]
