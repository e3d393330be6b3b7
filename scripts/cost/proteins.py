"""Time and peak memory of one training step of Performer's protein models, 8 heads and 6 layers.

Forward, backward and Adam of the models of configs/proteins at paper size, one sequence of residues
at a time, unidirectional (causal) or with gaps, and with exact softmax. See kit/layers.py.
"""

from functools import partial
from typing import Any

import torch
from kit import layers
from kit.rows import Rows
from torch import Tensor

from molflt.sequence import LanguageModel, MaskedLanguageModel
from molflt.tasks.language import LanguageTask
from molflt.tasks.masked import MaskedTask

SIZE: dict[str, Any] = {"dim": 512, "heads": 8, "layers": 6, "ffn_dim": 2048, "dropout": 0.1}
LENGTH, LIMIT = 8192, 12.0  # tokens; GB of the process
RESIDUES, SPECIAL = 25, 5
QUICK = {"sizes": (128,), "rounds": 1}


def causal_batch(draws: Tensor) -> tuple[Tensor, ...]:
    """Random residues, and the next one of each."""
    ids = (draws * RESIDUES).long()
    return ids, ids.roll(-1, 1)


def masked_batch(draws: Tensor) -> tuple[Tensor, ...]:
    """Random residues; their ids follow the special ones."""
    ids = (draws * RESIDUES).long() + SPECIAL
    return ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)


def made(length: int, causal: bool, **options: Any) -> layers.Step:
    if causal:
        own = {"absolute": "sinusoidal", **SIZE, **options}
        return layers.Step(LanguageTask(LanguageModel(RESIDUES + 1, **own)), causal_batch)
    masked = MaskedLanguageModel(RESIDUES + SPECIAL, max_length=length, **SIZE, **options)
    masked.set_special(4, [*range(SPECIAL)])
    return layers.Step(MaskedTask(masked), masked_batch)


MODELS = {
    "performer": layers.Mechanism(made, causal=(False, True)),
    "performer, sigmoid": layers.Mechanism(
        partial(made, feature_map="sigmoid"), causal=(False, True)
    ),
    "softmax": layers.Mechanism(partial(made, mixing="softmax"), causal=(False, True)),
}
STYLES = {"performer": (0, "-"), "performer, sigmoid": (1, "-"), "softmax": (6, "-")}
STUDY = layers.Study("cost.proteins", "residues", MODELS, partial(torch.rand, 1), STYLES)
measure = partial(
    *(layers.measure_layers, STUDY),
    sizes=(1024, 2048, 4096, LENGTH),
    rounds=3,
    seconds=900.0,
    gigabytes=LIMIT,
)
draw = partial(STUDY.draw, limit=LIMIT)
LARGE = [(name, LENGTH, causal, layers.TRAINING) for name in MODELS for causal in (False, True)]


def table(rows: Rows) -> str:
    """Markdown: costs, and the memory of whole processes at full length."""
    parts = STUDY.table(rows), layers.processes_table(rows, LARGE, STUDY.unit)
    return "\n\n".join(filter(None, parts))
