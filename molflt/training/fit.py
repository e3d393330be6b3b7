"""The training loop, with Lightning's Trainer underneath."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any, TypeVar

from molflt.data.batches import BatchedData
from molflt.tasks.base import Task
from molflt.training.callbacks import _callbacks_of, _Interrupted
from molflt.training.loggers import _logging
from molflt.training.loop import _run_steps
from molflt.training.run_folder import RunFolder
from molflt.training.trainer import TrainerOptions, computes_on

__all__ = ["fit"]

_Batch = TypeVar("_Batch")
_Data = TypeVar("_Data", bound=BatchedData[Sized])


def fit(
    task: Task[_Batch, _Data], data: _Data, folder: RunFolder, options: TrainerOptions
) -> tuple[int, int] | None:
    """Trains a task, or resumes from the checkpoint in the run folder.

    Args:
        task: model, loss and optimizer.
        data: training and validation data, set up.
        folder: for checkpoints and metrics.
        options: of the loop.

    Returns:
        If a signal stopped the training, its number and the step that was saved.
    """
    options.check()
    max_steps = options.steps(data)
    if task.warmup_steps >= max_steps:
        raise ValueError(
            f"task.warmup_steps must be less than trainer.max_steps={max_steps}; got "
            f"{task.warmup_steps}"
        )
    _warn_of_slow_average(options.ema_decay, max_steps)
    kept: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("log_every", "checkpoint_every", "ema_decay", "patience")
    }
    try:
        with _logging(options.logger, folder) as loggers:
            _run_steps(
                task,
                data,
                folder,
                ddp=options.devices > 1 or options.strategy == "ddp",
                max_steps=max_steps,
                precision=options.precision,
                accelerator="cuda" if computes_on(options.accelerator)[0] == "GPU" else "cpu",
                devices=options.devices,
                gradient_clip_val=options.gradient_clip,
                val_check_interval=options.val_every * options.accumulate,  # counted in batches
                accumulate_grad_batches=options.accumulate,
                num_sanity_val_steps=options.num_sanity,
                logger=loggers,
                callbacks=_callbacks_of(task, folder, **kept),
            )
    except _Interrupted as stop:
        return stop.signum, stop.step
    return None


def _warn_of_slow_average(decay: float | None, max_steps: int) -> None:
    """Warns if the average of weights ends with a large share of the first ones."""
    first = 0.0 if decay is None else decay ** (max_steps - 1)
    if first > 0.1:
        warnings.warn(
            f"trainer.ema_decay={decay:g} with trainer.max_steps={max_steps}: {first:.0%} of the "
            "averaged weights, which are validated and kept, are those of the first step; use "
            f"{max(0, 1 - 3 / max_steps):.3g} or less, or more steps",
            stacklevel=2,
        )
