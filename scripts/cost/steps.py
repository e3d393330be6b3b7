"""Time and peak memory of training steps, one sequence at a time; times are processor times.

arena         forward, backward and Adam of configs/lra/imdb.yaml with the mechanisms of
              configs/masked, after table 5 of FNet (arXiv:2105.03824)
pretraining   forward and backward of configs/masked/base.yaml with each of the mechanisms there, as
              in section 4.2 of FNet; without the optimizer, whose time is small

See kit/layers.py for the measurement.
"""

from functools import partial
from typing import Any

import torch
from kit import Benchmark
from kit.layers import Mechanism, Study, cost_ratio, curve, measure_layers, model_of
from kit.rows import Rows, markdown, names
from torch import Tensor, nn

from molflt.plots.figure import SERIES
from molflt.sequence import MaskedLanguageModel, SequenceClassifier
from molflt.tasks.masked import MaskedTask
from molflt.tasks.sentences import SentenceTask

SPECIAL = 5  # ids before those of bytes and pieces
BYTES, PIECES = 256, 32_000
COLORS = len(SERIES) - 1  # the last one is softmax's


class Step(nn.Module):
    """Training steps of a task on uniform numbers (1, length), which become ids.

    Args:
        task: the task with its model.
        symbols: number of different ids.
        classify: the sequence has a label, and the optimizer makes a step.
    """

    def __init__(self, task: Any, symbols: int, classify: bool) -> None:
        super().__init__()
        self.task, self.symbols = task, symbols
        self.adam = torch.optim.Adam(task.model.parameters()) if classify else None

    def forward(self, draws: Tensor) -> Tensor:
        ids = (draws.detach() * self.symbols).long()
        batch = ids + SPECIAL, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
        if self.adam is None:
            return self.task.loss(batch, 0.0)[0] + 0 * draws.sum()
        self.task.loss((*batch, torch.ones(1, dtype=torch.float64)), 0.0)[0].backward()
        self.adam.step()
        return draws.sum()


def classifier(length: int, causal: bool, file: str) -> Step:
    options = {**model_of("lra/imdb", f"masked/{file}"), "max_length": length}
    model = SequenceClassifier(BYTES + SPECIAL, 2, **options)
    return Step(SentenceTask(model), BYTES, classify=True)


def pretrained(length: int, causal: bool, file: str) -> Step:
    options = {**model_of("masked/base", f"masked/{file}"), "max_length": length}
    model = MaskedLanguageModel(PIECES, **options)
    model.set_special(SPECIAL - 1, [*range(SPECIAL)])
    return Step(MaskedTask(model), PIECES - SPECIAL, classify=False)


ARENA = Study(
    *("cost.steps:ARENA", "tokens"),
    {
        name: Mechanism(partial(classifier, file="bert" if name == "softmax" else name))
        for name in ("fnet", "performer", "flt", "softmax")
    },
    partial(torch.rand, 1),
    {"fnet": (2, "-"), "performer": (0, "-"), "flt": (1, "-"), "softmax": (6, "-")},
)
FILES = ("bert", "fnet-hybrid", "fnet", "linear", "random", "ff-only", "performer", "nprf", "flt")
STYLES = {file: (i % COLORS, "-" if i < COLORS else "--") for i, file in enumerate(FILES[1:])}
PRETRAINING = Study(
    *("cost.steps:PRETRAINING", "tokens"),
    {file: Mechanism(partial(pretrained, file=file)) for file in FILES},
    partial(torch.rand, 1),
    {**STYLES, "bert": (COLORS, "-")},
    budget=120.0,
)


def table_arena(rows: Rows) -> str:
    """Markdown: steps per second, also in units of softmax's; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        cells = {size: f"{1 / seconds:.3g}" for size, seconds in curve(rows, name, "seconds")}
        for size in cells:
            if ratio := cost_ratio(rows, "time", "softmax", name, size):
                cells[size] += f" ({ratio:.1f}x)"
        lines.append([name, *(cells.get(size, "–") for size in sizes)])
    return f"{markdown(['steps / s, tokens', *sizes], lines)}\n\n{ARENA.table(rows)}"


def table_pretraining(rows: Rows) -> str:
    """Markdown: speed in units of BERT's; then time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        ratios = [cost_ratio(rows, "time", "bert", name, size) for size in sizes]
        lines.append([name, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    speeds = markdown(["speed / BERT's, tokens", *sizes], lines)
    return f"{speeds}\n\n{PRETRAINING.table(rows)}"


LENGTHS = (512, 1024, 2048, 4096, 8192)
LIMITS: dict[str, Any] = {"seconds": 300.0, "gigabytes": 12.0}
BENCHMARKS = {
    "arena": Benchmark(
        "Time and peak memory of a training step of a classifier of Long Range Arena's bytes.",
        partial(measure_layers, ARENA, sizes=LENGTHS, rounds=5, **LIMITS),
        *(table_arena, {"sizes": (64,), "rounds": 1}, ARENA.draw, ARENA),
    ),
    "pretraining": Benchmark(
        "Time and peak memory of a step of masked pre-training at BERT-base's size, by mixer.",
        partial(measure_layers, PRETRAINING, sizes=(128, 512, 2048), rounds=3, **LIMITS),
        table_pretraining,
        {"sizes": (16,), "mechanisms": ("ff-only",), "rounds": 1},
        *(PRETRAINING.draw, PRETRAINING),
    ),
}
