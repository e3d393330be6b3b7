"""The steps of a training: their options, and the loop behind them."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from molflt.training.loggers import LoggerName, expect_logger

if TYPE_CHECKING:
    from collections.abc import Sized

    from molflt.data.batches import BatchedData
    from molflt.tasks.base import Task
    from molflt.training.run_folder import RunFolder

__all__ = ["STEPS", "check_steps", "fit", "total_steps"]

STEPS = 10_000
"""Steps of a training for which neither steps nor epochs are given."""

_Batch = TypeVar("_Batch")
_Data = TypeVar("_Data", bound="BatchedData[Sized]")


def fit(
    task: Task[_Batch, _Data],
    data: _Data,
    folder: RunFolder,
    max_steps: int | None = None,
    max_epochs: int | None = None,
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
    accumulate: int = 1,
    patience: int | None = None,
    logger: LoggerName = "csv",
) -> tuple[int, int] | None:
    """Runs the steps, with Lightning's Trainer underneath.

    Args:
        task: what is learned.
        data: on what.
        folder: for checkpoints and metrics; its checkpoint, if it has one, is what goes on.
        max_steps: optimizer steps in all; null: as many as max_epochs takes, or 10,000.
        max_epochs: passes over the training data in all, instead of max_steps; rounded up to whole
            steps, which decide about warm-up and schedule.
        precision: of the arithmetic.
        accelerator: where to compute; auto takes a GPU, by CUDA, if there is one.
        devices: GPUs, or processes on the CPU.
        strategy: ddp for more than one device; auto chooses it then.
        gradient_clip: largest norm of the gradient; null for no limit.
        val_every: steps between validations; there is one after the last step in any case.
        checkpoint_every: steps between checkpoints; each validation is preceded by one.
        ema_decay: decay of the moving average of weights that is validated and kept; null for none.
            After max_steps steps it still holds a share decay^max_steps of the first weights.
        log_every: steps between rows of metrics.csv.
        num_sanity: validation batches tried before training.
        accumulate: batches whose gradients are averaged for one step, each of them a pass of its
            own: the step of a batch so many times as large, in the memory of one.
        patience: validations in a row without a better value of the run's measure after which
            training stops; null for none.
        logger: where else the rows of metrics.csv go: nowhere (csv), to TensorBoard's files in the
            run folder, or to Weights & Biases.

    Returns:
        The number of the signal that stopped it early and the step at which the state was saved.
    """
    every = {"val_every": val_every, "checkpoint_every": checkpoint_every, "log_every": log_every}
    more = {"accumulate": accumulate, "patience": patience, "logger": logger}
    check_steps(max_steps, max_epochs, precision, accelerator, devices, **every, **more)
    max_steps = total_steps(data, max_steps, max_epochs, devices, accumulate)
    if task.warmup_steps >= max_steps:
        raise ValueError(
            f"task.warmup_steps must be less than trainer.max_steps={max_steps}; got "
            f"{task.warmup_steps}"
        )
    _warn_of_slow_average(ema_decay, max_steps)
    # Imported here, not above: the command line reads this signature before anything is trained.
    from molflt.training.callbacks import _callbacks_of, _Interrupted
    from molflt.training.loggers import _logging
    from molflt.training.loop import _run_steps

    try:
        with _logging(logger, folder) as loggers:
            _run_steps(
                task,
                data,
                folder,
                ddp=devices > 1 or strategy == "ddp",
                max_steps=max_steps,
                precision=precision,
                accelerator="cuda" if _devices(accelerator)[0] == "GPU" else "cpu",
                devices=devices,
                gradient_clip_val=gradient_clip,
                val_check_interval=val_every * accumulate,  # Lightning counts batches
                accumulate_grad_batches=accumulate,
                num_sanity_val_steps=num_sanity,
                logger=loggers,
                callbacks=_callbacks_of(
                    task, folder, log_every, checkpoint_every, ema_decay, patience
                ),
            )
    except _Interrupted as stop:
        return stop.signum, stop.step
    return None


def total_steps(
    data: BatchedData[Any],
    max_steps: int | None,
    max_epochs: int | None,
    devices: int = 1,
    accumulate: int = 1,
    **_: object,
) -> int:
    """Optimizer steps in all, from options of :func:`fit`; data that are set up."""
    if max_epochs is None:
        return STEPS if max_steps is None else max_steps
    steps = -(-data.batches_in(max_epochs) // (devices * accumulate))
    if max_steps not in (None, steps):
        raise ValueError(
            f"trainer.max_steps={max_steps} and trainer.max_epochs={max_epochs}, which is {steps} "
            "steps of these data; expected one of them; set the other to null"
        )
    return steps


def check_steps(
    max_steps: int | None,
    max_epochs: int | None,
    precision: str,
    accelerator: str,
    devices: int,
    **every: Any,
) -> None:
    """Refuses options of :func:`fit` that do not go together, or that this machine cannot do.

    Args:
        max_steps: an option of `fit`, as are all others.
        max_epochs: see there.
        precision: see there.
        accelerator: see there.
        devices: see there.
        every: its other options; those that count, and the logger, are checked.
    """
    counts = {"max_steps": max_steps, "max_epochs": max_epochs, "devices": devices}
    counted = ("accumulate", "patience", "val_every", "checkpoint_every", "log_every")
    counts |= {name: every[name] for name in counted if name in every}
    expect_logger(every.get("logger", "csv"))
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"trainer.{name} must be at least 1; got {value}")
    kind, most = _devices(accelerator)
    if not most:
        raise ValueError(
            "trainer.accelerator=gpu; expected a GPU that torch can use; got none; use cpu or auto"
        )
    if devices > most:
        raise ValueError(
            f"trainer.devices must be at most {most}, the {kind}s of this machine; got {devices}"
        )
    if precision == "16-mixed" and kind == "core":
        raise ValueError(
            "trainer.precision=16-mixed needs a GPU; use bf16-mixed or 32-true on the CPU"
        )


def _warn_of_slow_average(decay: float | None, max_steps: int) -> None:
    """Says so where an average of weights would end with much of the first ones in it."""
    first = 0.0 if decay is None else decay ** (max_steps - 1)
    if first > 0.1:
        warnings.warn(
            f"trainer.ema_decay={decay:g} with trainer.max_steps={max_steps}: {first:.0%} of the "
            "averaged weights, which are validated and kept, are those of the first step; use "
            f"{max(0, 1 - 3 / max_steps):.3g} or less, or more steps",
            stacklevel=2,
        )


def _devices(accelerator: str) -> tuple[str, int]:
    """What an accelerator computes on, and how many of them there are.

    Apple's GPUs have no float64, in which energies are summed, and do not count.
    """
    import torch

    gpus = torch.cuda.device_count()
    if accelerator == "gpu" or (accelerator == "auto" and gpus):
        return "GPU", gpus
    return "core", max(2, os.cpu_count() or 1)  # two processes on one core: to try it out
