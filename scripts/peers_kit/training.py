"""Steps of a training within a budget of CPU time.

Loss, normalization, augmentation, optimizer and schedule are those of `molflt train`, whose task
this runs, and so are the batches. The loop is not Lightning's, which counts in steps: here the
learning rate falls with the share of the budget that is used, and evaluation takes nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_geometric.data import Batch

from molflt.data.structures.datamodule import IS2REData
from molflt.tasks.is2re import IS2RETask


class CpuBudget:
    """CPU time that a job may use: counts that of this process inside of `running` alone, seconds.

    Attributes:
        used: so far.
        longest: of the longest block.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds = seconds
        self.clock = clock
        self.used = self.longest = 0.0

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


class Settings(NamedTuple):
    """Options of the loop, from those of `molflt train`."""

    span: int
    """`trainer.max_steps`, in units of which the schedule, `task.warmup_steps` too, is written"""
    clip: float | None
    """largest norm of the gradient"""
    ema_decay: float | None
    evaluations: int
    """points of the curve, evenly spread over the budget; the last one is at its end"""


class Point(NamedTuple):
    """Points of the curve of errors."""

    cpu_seconds: float
    step: int
    mae_eV: float
    ewt_percent: float


class Diverged(Exception):
    """The loss or the gradient is not finite any more."""


def train(
    task: IS2RETask,
    data: IS2REData,
    budget: CpuBudget,
    settings: Settings,
    evaluate: Callable[[nn.Module], tuple[float, float]],
) -> tuple[nn.Module, int, list[Point]]:
    """Trains until the budget is spent: the step during which that happens is the last.

    Returns the trained model, which is the moving average if there is one, in evaluation mode; the
    number of steps; the curve of what `evaluate` says, MAE in eV and EwT in %.
    """
    step, due, curve = 0, 1, []
    with budget.running():
        optimizer, batches = task.optimizer(), iter(data.train_dataloader())
        average = _average_of(task.model, settings.ema_decay)
    model = task.model if average is None else average.module
    while budget.used < budget.seconds:
        with budget.running():
            task.model.train()
            _redraw(task, step)
            _learn(task, next(batches), optimizer, budget.share, settings, step)
            if average is not None:
                average.update_parameters(task.model)
        step += 1
        if budget.share * settings.evaluations >= due:
            due = int(budget.share * settings.evaluations) + 1
            curve.append(Point(budget.used, step, *evaluate(model.eval())))
    return model.eval(), step, curve


def _average_of(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Moving average of weights over a tenth of the steps so far, or over what decay allows.

    With a fixed decay of 0.999, a slow net of 400 steps would be judged by weights of which two
    thirds are those of its first step.
    """
    if decay is None:
        return None

    def average(kept: tuple[Tensor, ...], new: tuple[Tensor, ...], count: Tensor | int) -> None:
        warm = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, warm))(kept, new, count)

    return AveragedModel(model, multi_avg_fn=average, use_buffers=False)


def _redraw(task: IS2RETask, step: int) -> None:
    if task.redraw_every and step and step % task.redraw_every == 0:
        seed = np.random.SeedSequence([task.seed, step]).generate_state(1)[0]
        task.redraw(torch.Generator().manual_seed(int(seed)))


def _learn(
    task: IS2RETask,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    share: float,
    settings: Settings,
    step: int,
) -> None:
    """One step, at a share of the budget."""
    for group in optimizer.param_groups:
        first = group.setdefault("initial_lr", group["lr"])  # with its own of task.lr_factors
        group["lr"] = first * task.lr_factor(int(share * settings.span), settings.span)
    optimizer.zero_grad()
    loss, _ = task.loss(batch, share)
    loss.backward()
    limit = float("inf") if settings.clip is None else settings.clip
    norm = nn.utils.clip_grad_norm_(task.model.parameters(), limit)
    if not (bool(loss.isfinite()) and bool(norm.isfinite())):
        raise Diverged(f"loss {loss.item()}, gradient norm {norm.item()} at step {step}")
    optimizer.step()
