"""The steps of a training: their options, and the loop behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sized

    from molflt.data.batches import BatchedData
    from molflt.tasks.base import Task

__all__ = ["fit"]

_Batch = TypeVar("_Batch")
_Data = TypeVar("_Data", bound="BatchedData[Sized]")


def fit(
    task: Task[_Batch, _Data],
    data: _Data,
    run: Path,
    resume: bool = False,
    max_steps: int = 10_000,
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true",
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    devices: int = 1,
    strategy: Literal["auto", "ddp"] = "auto",
    gradient_clip: float | None = 5.0,
    val_every: int = 500,
    checkpoint_every: int = 500,
    ema_decay: float | None = None,
    log_every: int = 50,
    num_sanity: int = 2,
) -> tuple[int, int] | None:
    """Runs the steps, with Lightning's Trainer underneath.

    Args:
        task: what is learned.
        data: on what.
        run: folder for checkpoints and metrics.
        resume: go on from the folder's last checkpoint.
        max_steps: optimizer steps in all.
        precision: of the arithmetic.
        accelerator: where to compute; auto takes a GPU if there is one.
        devices: GPUs, or processes on the CPU.
        strategy: ddp for more than one device; auto chooses it then.
        gradient_clip: largest norm of the gradient; null for no limit.
        val_every: steps between validations; there is one after the last step in any case.
        checkpoint_every: steps between checkpoints; each validation is preceded by one.
        ema_decay: decay of the moving average of weights that is validated and kept; null for none.
        log_every: steps between rows of metrics.csv.
        num_sanity: validation batches tried before training.

    Returns:
        The number of the signal that stopped it early and the step at which the state was saved.

    Raises:
        ValueError: for an option outside its range, a missing label, or a loss that is not finite.
    """
    _check_counts(
        task.warmup_steps,
        max_steps=max_steps,
        devices=devices,
        val_every=val_every,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
    )
    # Imported here, not above: the command line reads this signature before anything is trained.
    from molflt.training.callbacks import _callbacks_of, _Interrupted
    from molflt.training.loop import _run_steps

    try:
        _run_steps(
            task,
            data,
            run,
            resume,
            ddp=devices > 1 or strategy == "ddp",
            max_steps=max_steps,
            precision=precision,
            accelerator=accelerator,
            devices=devices,
            gradient_clip_val=gradient_clip,
            val_check_interval=val_every,
            num_sanity_val_steps=num_sanity,
            callbacks=_callbacks_of(task, run, log_every, checkpoint_every, ema_decay),
        )
    except _Interrupted as stop:
        return stop.signum, stop.step
    return None


def _check_counts(warmup_steps: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"trainer.{name} must be at least 1; got {value}")
    if warmup_steps >= counts["max_steps"]:
        raise ValueError(
            f"task.warmup_steps must be less than trainer.max_steps={counts['max_steps']}; "
            f"got {warmup_steps}"
        )
