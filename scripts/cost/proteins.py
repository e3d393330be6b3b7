"""Time and peak memory of one training step of Performer's protein models, 8 heads and 6 layers.

Forward, backward and Adam of the models of configs/proteins at paper size, one sequence of residues
at a time, unidirectional (causal) or with gaps; exact softmax beside them. See kit/layers.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from kit.layers import Mechanism, Step, Study, cost_table, draw_costs, measure_layers
from kit.rows import Promise, Rows, pick
from torch import Tensor

from molflt.sequence import LanguageModel, MaskedLanguageModel
from molflt.tasks.language import LanguageTask
from molflt.tasks.masked import MaskedTask

SIZE: dict[str, Any] = {"dim": 512, "heads": 8, "layers": 6, "ffn_dim": 2048, "dropout": 0.1}
LENGTH, LIMIT = 8192, 12.0  # tokens; GB of the process
RESIDUES, SPECIAL = 25, 5
QUICK = {"sizes": (128,), "rounds": 1}


def causal_batch(draws: Tensor) -> tuple[Tensor, ...]:
    """Residues, and the next ones."""
    ids = (draws * RESIDUES).long()
    return ids, ids.roll(-1, 1)


def masked_batch(draws: Tensor) -> tuple[Tensor, ...]:
    """Residues behind the special ids."""
    ids = (draws * RESIDUES).long() + SPECIAL
    return ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)


def made(length: int, causal: bool, **options: Any) -> Step:
    if causal:
        own = {"absolute": "sinusoidal", **SIZE, **options}
        return Step(LanguageTask(LanguageModel(RESIDUES + 1, **own)), causal_batch)
    masked = MaskedLanguageModel(RESIDUES + SPECIAL, max_length=length, **SIZE, **options)
    masked.set_special(4, [*range(SPECIAL)])
    return Step(MaskedTask(masked), masked_batch)


MODELS = {
    "performer": Mechanism(made, causal=(False, True)),
    "performer, sigmoid": Mechanism(partial(made, feature_map="sigmoid"), causal=(False, True)),
    "softmax": Mechanism(partial(made, mixing="softmax"), causal=(False, True)),
}
STYLES = {"performer": (0, "-"), "performer, sigmoid": (1, "-"), "softmax": (6, "-")}
STUDY = Study("cost.proteins", MODELS, partial(torch.rand, 1))
measure = partial(
    *(measure_layers, STUDY),
    sizes=(1024, 2048, 4096, LENGTH),
    rounds=3,
    seconds=900.0,
    gigabytes=LIMIT,
)
table = partial(cost_table, unit="residues")
draw = partial(draw_costs, unit="residues", styles=STYLES, limit=LIMIT)


def gigabytes(rows: Rows, causal: bool) -> float | None:
    """Peak memory of Performer at full length; infinite if it was skipped."""
    found = pick(rows, mechanism="performer", length=LENGTH, causal=causal)
    if not found:
        return None
    return float("inf") if found[0]["note"] else found[0]["process_MiB"] * 2**20 / 1e9


PROMISES = [
    Promise(
        f"GB of the process of performer with {LENGTH} residues{', causal' * causal}",
        partial(gigabytes, causal=causal),
        most=LIMIT,
    )
    for causal in (False, True)
]
