"""Names, classes and learning rates of the compared models."""

import os
from pathlib import Path
from typing import NamedTuple

from compare import name_of, words_of

from peers_kit import nets, ridge

REPOSITORY = Path(__file__).resolve().parents[2]
RECOMMENDED = "molflt"  # the form of --config
OURS = {
    name: f"configs/atoms/{name}.yaml" for name in ("flt", "performer", "softmax-mask", "softmax")
}


class Net(NamedTuple):
    """A peer that is trained with gradients; batch size None: that of the configuration."""

    make: type[nets.Peer]
    lr: float
    batch_size: int | None = None


NETS = {
    "schnet": Net(nets.PeriodicSchNet, 5e-4),
    "dimenet++": Net(nets.PeriodicDimeNet, 1e-3, batch_size=8),
    "visnet": Net(nets.PeriodicViSNet, 4e-4),
    "painn": Net(nets.PeriodicPaiNN, 5e-4),
}
FITS = {"kernel-ridge": ridge.KernelRidge, "median": ridge.Median}
MODELS = (RECOMMENDED, *OURS, *NETS, *FITS)
TRIED = (1 / 3, 1.0, 3.0)  # learning rates, in units of the usual one


def title(model: str) -> str:
    """The name of a model: one of `MODELS`, or that of a variant FILE.yaml[,key=value]."""
    if model in MODELS:
        return model
    if not model.partition(",")[0].endswith(".yaml"):
        raise ValueError(
            f"model {model!r} is unknown; expected one of {', '.join(MODELS)}, or a file of "
            "options of molflt train, FILE.yaml[,key=value ...]"
        )
    return name_of(model)


def variant_words(model: str) -> list[str]:
    """Options of `molflt train` that define a model of molflt; none for other models."""
    if model in OURS:
        # relative paths, to continue results in another clone
        return words_of(os.path.relpath(REPOSITORY / OURS[model]))
    return [] if model in MODELS else words_of(model)
