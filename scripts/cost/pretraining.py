"""Time and peak memory of a step of masked pre-training at BERT-base's size, by mixer.

Forward and backward of configs/masked/base.yaml with each of the mechanisms there, one sequence at
a time, as in section 4.2 of FNet (arXiv:2105.03824). The optimizer is left out, because its time is
small and the same for all mechanisms. See kit/layers.py; times are processor times.
"""

from functools import partial

import torch
from kit import layers
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
        options = {**layers.model_of("masked/base", f"masked/{file}"), "max_length": length}
        model = MaskedLanguageModel(PIECES, **options)
        model.set_special(SPECIAL - 1, [*range(SPECIAL)])
        self.task = MaskedTask(model)

    def forward(self, draws: Tensor) -> Tensor:
        """Makes the step on uniform numbers (1, length), which become pieces."""
        ids = (draws.detach() * (PIECES - SPECIAL)).long() + SPECIAL
        there = torch.ones_like(ids, dtype=torch.bool)
        loss, _ = self.task.loss((ids, torch.zeros_like(ids), there), 0.0)
        return loss + 0 * draws.sum()


MODELS = {file: layers.Mechanism(partial(Step, file=file)) for file in FILES}
COLORS = len(SERIES) - 1  # the last one is softmax's
STYLES = {file: (i % COLORS, "-" if i < COLORS else "--") for i, file in enumerate(FILES[1:])}
STYLES["bert"] = (COLORS, "-")
STUDY = layers.Study(
    *("cost.pretraining", "tokens", MODELS, partial(torch.rand, 1), STYLES), budget=120.0
)
measure = partial(
    layers.measure_layers, STUDY, sizes=(128, 512, 2048), rounds=3, seconds=300.0, gigabytes=12.0
)
draw = STUDY.draw


def table(rows: Rows) -> str:
    """Markdown: speed in units of BERT's; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        ratios = [layers.cost_ratio(rows, "time", "bert", name, size) for size in sizes]
        lines.append([name, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    speeds = markdown(["speed / BERT's, tokens", *sizes], lines)
    return f"{speeds}\n\n{STUDY.table(rows)}"
