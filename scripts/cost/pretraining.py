"""Time and peak memory of a step of masked pre-training at BERT-base's size, by mixer.

Forward and backward of configs/masked/base.yaml with each of the mechanisms there, one sequence at
a time, as FNet (arXiv:2105.03824) compares its mixers in section 4.2. The optimizer is left out: it
takes the same for all, and next to nothing of a step with the papers' batch of 256 sequences. See
kit/layers.py; time is the processor's.
"""

from __future__ import annotations

from functools import partial

import torch
from kit.layers import (
    Mechanism,
    Study,
    cost_promise,
    cost_ratio,
    cost_table,
    draw_costs,
    measure_layers,
    model_of,
)
from kit.rows import Rows, markdown, names
from torch import Tensor, nn

from molflt.plots.figure import SERIES
from molflt.sequence import MaskedLanguageModel
from molflt.tasks.masked import MaskedTask

PIECES, SPECIAL = 32_000, 5
FILES = ("bert", "fnet-hybrid", "fnet", "linear", "random", "ff-only", "performer", "nprf", "flt")
QUICK = {"sizes": (16,), "mechanisms": ("ff-only",), "rounds": 1}


class Step(nn.Module):
    """Loss and gradients of a training step by the task."""

    def __init__(self, length: int, causal: bool, file: str) -> None:
        super().__init__()
        options = {**model_of("masked/base", f"masked/{file}"), "max_length": length}
        model = MaskedLanguageModel(PIECES, **options)
        model.set_special(SPECIAL - 1, [*range(SPECIAL)])
        self.task = MaskedTask(model)

    def forward(self, draws: Tensor) -> Tensor:
        """Makes the step on uniform numbers (1, length), which become pieces."""
        ids = (draws.detach() * (PIECES - SPECIAL)).long() + SPECIAL
        there = torch.ones_like(ids, dtype=torch.bool)
        loss, _ = self.task.loss((ids, torch.zeros_like(ids), there), 0.0)
        return loss + 0 * draws.sum()


MODELS = {file: Mechanism(partial(Step, file=file)) for file in FILES}
STUDY = Study("cost.pretraining", MODELS, partial(torch.rand, 1), budget=120.0)
measure = partial(
    measure_layers, STUDY, sizes=(128, 512, 2048), rounds=3, seconds=300.0, gigabytes=12.0
)
COLORS = len(SERIES) - 1  # the last is softmax's
STYLES = {file: (i % COLORS, "-" if i < COLORS else "--") for i, file in enumerate(FILES[1:])}
draw = partial(draw_costs, unit="tokens", styles={**STYLES, "bert": (COLORS, "-")})


def table(rows: Rows) -> str:
    """Markdown: how many times BERT's steps per second; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        ratios = [cost_ratio(rows, "time", "bert", name, size) for size in sizes]
        lines.append([name, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    speeds = markdown(["speed / BERT's, tokens", *sizes], lines)
    return f"{speeds}\n\n{cost_table(rows, unit='tokens')}"


PROMISES = [cost_promise("time", "fnet", "bert", (512, "tokens"), most=0.8)]
