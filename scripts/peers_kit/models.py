"""Names, classes and learning rates of the compared models."""

import os
from pathlib import Path
from typing import NamedTuple

from kit.runs import name_of, words_of

from peers_kit import nets, ridge

REPOSITORY = Path(__file__).resolve().parents[2]
RECOMMENDED = "molflt"  # the model of --config
OURS = {
    name: f"configs/atoms/{name}.yaml" for name in ("flt", "performer", "softmax-mask", "softmax")
}


class Net(NamedTuple):
    """A network and its usual options; `batch_size=None` selects the batch size of --config."""

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
TRIED = (1 / 3, 1.0, 3.0)  # learning rates, relative to the usual rate


def title(model: str) -> str:
    """Returns the name of a model: an entry of `MODELS`, or a variant FILE.yaml[,key=value ...]."""
    if model in MODELS:
        return model
    if not model.partition(",")[0].endswith(".yaml"):
        raise ValueError(
            f"model {model!r} is unknown; expected one of {', '.join(MODELS)}, or a configuration "
            "FILE.yaml[,key=value ...]"
        )
    return name_of(model)


def variant_words(model: str) -> list[str]:
    """Returns the options of `molflt train` that define a variant of --config, otherwise []."""
    if model in OURS:
        # The path is relative, because a comparison may be continued in a different clone.
        return words_of(os.path.relpath(REPOSITORY / OURS[model]))
    return [] if model in MODELS else words_of(model)
