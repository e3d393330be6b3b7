"""Time and peak memory of one training step of the classifier of bytes of Long Range Arena.

Forward, backward and Adam of configs/lra/imdb.yaml with the mechanisms of configs/masked, one text
at a time, after table 5 of FNet (arXiv:2105.03824). See kit/layers.py; times are processor times.
"""

from functools import partial

import torch
from kit import layers
from kit.rows import Rows, markdown, names
from torch import Tensor

from molflt.sequence import SequenceClassifier
from molflt.tasks.sentences import SentenceTask

BYTES, SPECIAL = 256, 5
FILES = {"fnet": "fnet", "performer": "performer", "flt": "flt", "softmax": "bert"}
QUICK = {"sizes": (64,), "rounds": 1}


def batch_of(draws: Tensor) -> tuple[Tensor, ...]:
    """Random bytes with a label."""
    ids = (draws * BYTES).long() + SPECIAL
    there = torch.ones_like(ids, dtype=torch.bool)
    return ids, torch.zeros_like(ids), there, torch.ones(1, dtype=torch.float64)


def made(length: int, causal: bool, file: str) -> layers.Step:
    options = {**layers.model_of("lra/imdb", f"masked/{file}"), "max_length": length}
    task = SentenceTask(SequenceClassifier(BYTES + SPECIAL, 2, **options))
    return layers.Step(task, batch_of)


MODELS = {name: layers.Mechanism(partial(made, file=file)) for name, file in FILES.items()}
STYLES = {"fnet": (2, "-"), "performer": (0, "-"), "flt": (1, "-"), "softmax": (6, "-")}
STUDY = layers.Study("cost.arena", "tokens", MODELS, partial(torch.rand, 1), STYLES)
measure = partial(
    *(layers.measure_layers, STUDY),
    sizes=(512, 1024, 2048, 4096, 8192),
    rounds=5,
    seconds=300.0,
    gigabytes=12.0,
)
draw = STUDY.draw


def table(rows: Rows) -> str:
    """Markdown: steps per second, also in units of softmax's; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        points = layers.curve(rows, name, "seconds")
        cells = {size: f"{1 / seconds:.3g}" for size, seconds in points}
        for size in cells:
            if ratio := layers.cost_ratio(rows, "time", "softmax", name, size):
                cells[size] += f" ({ratio:.1f}x)"
        lines.append([name, *(cells.get(size, "–") for size in sizes)])
    return f"{markdown(['steps / s, tokens', *sizes], lines)}\n\n{STUDY.table(rows)}"
