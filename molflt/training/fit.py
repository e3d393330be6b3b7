"""The training loop on Lightning's Trainer, and its optional loggers."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from molflt.data.batches import BatchedData
from molflt.tasks.base import Task
from molflt.training.callbacks import _callbacks_of, _Interrupted
from molflt.training.loop import _run_steps
from molflt.training.run_folder import RunFolder
from molflt.training.trainer import LoggerName, TrainerOptions, computes_on

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

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
        options: options of the loop.

    Returns:
        The number of the signal that stopped the training and the step that was saved; None if
        the training finished.
    """
    options.check()
    max_steps = options.steps(data)
    if task.warmup_steps >= max_steps:
        raise ValueError(
            f"task.warmup_steps must be less than trainer.max_steps={max_steps}; got "
            f"{task.warmup_steps}"
        )
    _warn_of_slow_average(options.ema_decay, max_steps)
    try:
        with _loggers(options.logger, folder) as loggers:
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
                callbacks=_callbacks_of(task, folder, options),
            )
    except _Interrupted as stop:
        return stop.signum, stop.step
    return None


def _warn_of_slow_average(decay: float | None, max_steps: int) -> None:
    """Warns if the initial weights keep a large share of the averaged weights."""
    first = 0.0 if decay is None else decay ** (max_steps - 1)
    if first > 0.1:
        warnings.warn(
            f"trainer.ema_decay={decay:g} with trainer.max_steps={max_steps}: {first:.0%} of the "
            "averaged weights, which are validated and kept, come from the first step; use "
            f"{max(0, 1 - 3 / max_steps):.3g} or less, or more steps",
            stacklevel=2,
        )


@contextmanager
def _loggers(name: LoggerName, folder: RunFolder) -> Iterator[list[Logger]]:
    """Opens Lightning's logger; metrics.csv is written in any case, and csv needs no logger.

    A resumed run continues its logs: TensorBoard drops the steps that are repeated, and Weights &
    Biases identifies the run by a digest of its folder and start.
    """
    if name == "csv" or not folder.writes:
        yield []
        return
    logger = _tensorboard(folder) if name == "tensorboard" else _wandb(folder)
    logger.log_hyperparams(dict(folder.provenance["config"]))
    try:
        yield [logger]
    finally:
        if name == "wandb":
            logger.experiment.finish()  # or the next run of this process would write into it


def _tensorboard(folder: RunFolder) -> TensorBoardLogger:
    from lightning.pytorch.loggers import TensorBoardLogger

    # Includes the step of the checkpoint, whose validation may be repeated; if it is not, its rows
    # are logged again from metrics.csv.
    step = None if folder.checkpoint is None else folder.checkpoint["global_step"]
    return TensorBoardLogger(folder.path, name="", version="tensorboard", purge_step=step)


def _wandb(folder: RunFolder) -> WandbLogger:
    from lightning.pytorch.loggers import WandbLogger

    begun = (folder.path / "versions.json").read_bytes()
    own = hashlib.sha256(str(folder.path.resolve()).encode() + begun).hexdigest()[:16]
    project = os.environ.get("WANDB_PROJECT", "molflt")
    logger = WandbLogger(folder.path.name, save_dir=folder.path, project=project, id=own)
    try:
        _ = logger.experiment  # asks for the login now, not in the middle of training
    except Exception as error:  # wandb's exceptions have no common base class
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"trainer.logger=wandb: could not start; {reason}; log in with `wandb login`, or set "
            "WANDB_MODE=offline"
        ) from error
    return logger
