"""Time and peak memory of a masked pre-training step at the size of BERT-base, by mixer.

A step is a forward and backward pass on one sequence; FNet (arXiv:2105.03824, section 4.2) measures
batches. The model is configs/masked/base.yaml with a mechanism from the same folder. The optimizer
is not timed. Times are CPU times. See kit/layers.py for the measurement.
"""

from functools import partial

import torch
from kit import layers
from kit.pictures import styles_of
from kit.rows import Rows, markdown, names
from torch import Tensor, nn

from molflt.sequence import MaskedLanguageModel
from molflt.tasks.masked import MaskedTask

SPECIAL, PIECES = 5, 32_000  # number of special tokens, total number of tokens
FILES = ("bert", "fnet-hybrid", "fnet", "linear", "random", "ff-only", "performer", "nprf", "flt")


class Step(nn.Module):
    """A training step of a mixer.

    The input consists of uniform random numbers (1, length), which are converted to token ids.
    """

    def __init__(self, length: int, causal: bool, file: str) -> None:
        super().__init__()
        options = {**layers.model_of("masked/base", f"masked/{file}"), "max_length": length}
        model = MaskedLanguageModel(PIECES, **options)
        model.set_special(SPECIAL - 1, [*range(SPECIAL)])
        self.task = MaskedTask(model)

    def forward(self, draws: Tensor) -> Tensor:
        ids = (draws.detach() * (PIECES - SPECIAL)).long()
        batch = ids + SPECIAL, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
        return self.task.loss(batch, 0.0)[0] + 0 * draws.sum()


STUDY = layers.Study(
    *("cost.pretraining", "tokens"),
    {file: partial(Step, file=file) for file in FILES},
    partial(torch.rand, 1),
    styles_of(FILES, "bert"),
    budget=120.0,
)
QUICK = {"sizes": (16,), "mechanisms": ("ff-only",), "rounds": 1}
measure = partial(
    layers.measure_layers, STUDY, sizes=(128, 512, 2048), rounds=3, seconds=300.0, gigabytes=12.0
)
draw = STUDY.draw


def table(rows: Rows) -> str:
    """Formats the speed relative to BERT, followed by time and memory."""
    sizes = names(rows, "length")
    lines = []
    for name in names(rows, "mechanism"):
        ratios = [layers.cost_ratio(rows, "time", "bert", name, size) for size in sizes]
        lines.append([name, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    speeds = markdown(["speed / BERT's, tokens", *sizes], lines)
    return f"{speeds}\n\n{layers.cost_table(rows, 'tokens')}"
