"""Training within a budget of CPU time."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from molflt.training.checkpoint import read_plain, write_checkpoint

WARM = 0.02  # share of the time with a rising learning rate


class CpuBudget:
    """CPU seconds of a training run; only the time inside `running` counts.

    Attributes:
        used: seconds so far.
        longest: seconds of the longest block.
        steps: number of training steps.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds, self.clock = seconds, clock
        self.used = self.longest = 0.0
        self.steps = 0

    @property
    def share(self) -> float:
        """Used share, 0 to 1."""
        return min(1.0, self.used / self.seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        start = self.clock()
        try:
            yield
        finally:
            took = self.clock() - start
            self.used += took
            self.longest = max(self.longest, took)


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Moving average of weights over at most a tenth of the steps so far.

    With a fixed decay of 0.999, two thirds of a slow net's average after 400 steps would be its
    initial weights.
    """

    def average(kept: tuple[Tensor, ...], new: tuple[Tensor, ...], count: Tensor | int) -> None:
        warm = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, warm))(kept, new, count)

    return AveragedModel(model, multi_avg_fn=average, use_buffers=False)


def fit(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    budget: CpuBudget,
    loss_of: Callable[[int], Tensor],
    clip: float,
    average: AveragedModel | None = None,
    save_every: float = 60.0,
) -> None:
    """Trains until the budget is spent, including the time of earlier calls with the same file.

    `loss_of` takes the number of the step. Learning rates rise for a fiftieth of the time to those
    of the optimizer, and then fall to 0 as a cosine. The state is saved every `save_every` CPU
    seconds and at the end.
    """
    parts = {"model": model, "optimizer": optimizer}
    parts |= {} if average is None else {"average": average}
    rates = [group["lr"] for group in optimizer.param_groups]
    if path.exists():
        kept = read_plain(path)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        budget.steps, budget.used = kept["step"], kept["spent"]
    saved = budget.used
    model.train()
    while budget.used < budget.seconds:
        with budget.running():
            factor = min(budget.share / WARM, 0.5 * (1 + math.cos(math.pi * budget.share)))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
            loss = loss_of(budget.steps)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
        budget.steps += 1
        if budget.used - saved > save_every or budget.used >= budget.seconds:
            print(f"{path.stem}: step {budget.steps}, {budget.used:.0f} s, loss {loss.item():.4f}")
            state = {name: part.state_dict() for name, part in parts.items()}
            write_checkpoint(path, {**state, "step": budget.steps, "spent": budget.used})
            saved = budget.used
