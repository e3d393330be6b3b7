"""Compared models: names, builders and learning rates."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from compare import name_of, words_of

REPOSITORY = Path(__file__).resolve().parents[2]
RECOMMENDED = "molflt"  # the form of --config
OURS = {
    name: f"configs/atoms/{name}.yaml" for name in ("flt", "performer", "softmax-mask", "softmax")
}


class Net(NamedTuple):
    """A peer that is trained by gradients."""

    make: str
    """module:class"""
    lr: float
    """usual one"""
    batch_size: int | None = None
    """None: that of the configuration"""


NETS = {
    "schnet": Net("peers_kit.nets:PeriodicSchNet", 5e-4),
    "dimenet++": Net("peers_kit.nets:PeriodicDimeNet", 1e-3, batch_size=8),
    "visnet": Net("peers_kit.nets:PeriodicViSNet", 4e-4),
    "painn": Net("peers_kit.nets:PeriodicPaiNN", 5e-4),
}
FITS = {"kernel-ridge": "peers_kit.ridge:KernelRidge", "median": "peers_kit.ridge:Median"}
MODELS = (RECOMMENDED, *OURS, *NETS, *FITS)
TRIED = (1 / 3, 1.0, 3.0)  # learning rates, in units of the usual one


def load(place: str) -> Callable[..., Any]:
    """The class at module:class."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def title(model: str) -> str:
    """Checks the name of a model: one of `MODELS`, or a variant FILE.yaml[,key=value]."""
    if model in MODELS:
        return model
    if not model.partition(",")[0].endswith(".yaml"):
        raise ValueError(
            f"model {model!r} is unknown; expected one of {', '.join(MODELS)}, or a file of "
            "options of molflt train, FILE.yaml[,key=value ...]"
        )
    return name_of(model)


def variant_words(model: str) -> list[str]:
    """Options of `molflt train` that make a model of ours what it is; none for others."""
    if model in OURS:
        # relative, so that results can be gone on with in another clone
        return words_of(os.path.relpath(REPOSITORY / OURS[model]))
    return [] if model in MODELS else words_of(model)
