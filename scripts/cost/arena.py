"""Time and peak memory of one training step of the classifier of bytes of Long Range Arena.

Forward, backward and Adam of configs/lra/imdb.yaml with the mechanisms of configs/masked, one text
at a time, after table 5 of FNet (arXiv:2105.03824); steps per second are those of that batch of 1.
See kit/layers.py; time is the processor's.
"""

from __future__ import annotations

from functools import partial

import torch
from kit.layers import (
    Mechanism,
    Step,
    Study,
    cost_promise,
    cost_ratio,
    cost_table,
    curve,
    draw_costs,
    measure_layers,
    model_of,
)
from kit.rows import Rows, markdown, names
from torch import Tensor

from molflt.sequence import SequenceClassifier
from molflt.tasks.sentences import SentenceTask

BYTES, SPECIAL = 256, 5
FILES = {"fnet": "fnet", "performer": "performer", "flt": "flt", "softmax": "bert"}
QUICK = {"sizes": (64,), "rounds": 1}


def batch_of(draws: Tensor) -> tuple[Tensor, ...]:
    """Bytes."""
    ids = (draws * BYTES).long() + SPECIAL
    there = torch.ones_like(ids, dtype=torch.bool)
    return ids, torch.zeros_like(ids), there, torch.ones(1, dtype=torch.float64)


def made(length: int, causal: bool, file: str) -> Step:
    options = {**model_of("lra/imdb", f"masked/{file}"), "max_length": length}
    return Step(SentenceTask(SequenceClassifier(BYTES + SPECIAL, 2, **options)), batch_of)


MODELS = {name: Mechanism(partial(made, file=file)) for name, file in FILES.items()}
STYLES = {"fnet": (2, "-"), "performer": (0, "-"), "flt": (1, "-"), "softmax": (6, "-")}
STUDY = Study("cost.arena", MODELS, partial(torch.rand, 1))
measure = partial(
    *(measure_layers, STUDY),
    sizes=(512, 1024, 2048, 4096, 8192),
    rounds=5,
    seconds=300.0,
    gigabytes=12.0,
)
draw = partial(draw_costs, unit="tokens", styles=STYLES)


def table(rows: Rows) -> str:
    """Markdown: steps per second, and how many times those of softmax; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        cells = {size: f"{1 / seconds:.3g}" for size, seconds in curve(rows, name, "seconds")}
        for size in cells:
            if ratio := cost_ratio(rows, "time", "softmax", name, size):
                cells[size] += f" ({ratio:.1f}x)"
        lines.append([name, *(cells.get(size, "–") for size in sizes)])
    speeds = markdown(["steps / s, tokens", *sizes], lines)
    return f"{speeds}\n\n{cost_table(rows, unit='tokens')}"


PROMISES = [cost_promise("time", "fnet", "softmax", (4096, "tokens"), most=0.5)]
