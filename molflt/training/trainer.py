"""Options of the training loop: the group `trainer` of a configuration."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, Literal

from molflt.data.batches import BatchedData

__all__ = ["STEPS", "LoggerName", "TrainerOptions", "computes_on"]

STEPS = 10_000
"""Number of steps if neither steps nor epochs are given."""

LoggerName = Literal["csv", "tensorboard", "wandb"]


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the training loop.

    Args:
        max_steps: total number of optimizer steps; null: determined by max_epochs, or else 10,000.
        max_epochs: total number of passes over the training data, an alternative to max_steps; it
            is converted to steps, rounded up, and the learning rate schedule is based on these.
        precision: number format of the computation.
        accelerator: where to compute; auto uses a CUDA GPU if there is one.
        devices: number of GPUs, or of processes on the CPU.
        strategy: ddp, which trains on several devices, or auto, which uses ddp if necessary.
        gradient_clip: maximum norm of the gradient; null for no limit.
        val_every: steps between validations; the last step is always followed by one.
        checkpoint_every: steps between checkpoints; one is also saved before each validation.
        ema_decay: decay of the moving average of weights that is validated and kept; null for no
            average. After max_steps steps, the initial weights still have the share
            decay^max_steps.
        log_every: steps between rows of metrics.csv.
        num_sanity: number of validation batches to try before training.
        accumulate: number of batches whose gradients are averaged for one step. This gives the step
            of a larger batch with the memory of a small one.
        patience: number of validations without improvement after which training stops; null to
            never stop early.
        logger: additional destination of the rows of metrics.csv: nothing (csv), TensorBoard files
            in the run folder, or Weights & Biases.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    strategy: Literal["auto", "ddp"] = "auto"
    gradient_clip: float | None = 5.0
    val_every: int = 500
    checkpoint_every: int = 500
    ema_decay: float | None = None
    log_every: int = 50
    num_sanity: int = 2
    accumulate: int = 1
    patience: int | None = None
    logger: LoggerName = "csv"

    def steps(self, data: BatchedData[Any]) -> int:
        """Returns the total number of optimizer steps for data that have been set up."""
        if self.max_epochs is None:
            return STEPS if self.max_steps is None else self.max_steps
        steps = -(-data.batches_in(self.max_epochs) // (self.devices * self.accumulate))
        if self.max_steps not in (None, steps):
            raise ValueError(
                f"trainer.max_steps={self.max_steps} and trainer.max_epochs={self.max_epochs}, "
                f"which is {steps} steps of these data; expected one of them; set the other to null"
            )
        return steps

    def check(self) -> None:
        """Raises ValueError for options that conflict or exceed the available devices."""
        if self.logger != "csv" and importlib.util.find_spec(self.logger) is None:
            raise ModuleNotFoundError(
                f"trainer.logger={self.logger} needs the package {self.logger}; got none; pip "
                f"install 'molflt[{self.logger}]', or use csv"
            )
        kind, most = computes_on(self.accelerator)
        if not most:
            raise ValueError(
                "trainer.accelerator=gpu; expected a GPU that torch can use; got none; use cpu or "
                "auto"
            )
        if self.devices > most:
            raise ValueError(
                f"trainer.devices must be at most {most}, the number of {kind}s of this machine; "
                f"got {self.devices}"
            )
        if self.precision == "16-mixed" and kind == "core":
            raise ValueError(
                "trainer.precision=16-mixed needs a GPU; use bf16-mixed or 32-true on the CPU"
            )


def computes_on(accelerator: str) -> tuple[str, int]:
    """Returns the kind of device, "GPU" or "core", and how many there are.

    Apple GPUs are not counted because they lack float64, in which energies are summed.
    """
    import torch

    gpus = torch.cuda.device_count()
    if accelerator == "gpu" or (accelerator == "auto" and gpus):
        return "GPU", gpus
    return "core", max(2, os.cpu_count() or 1)  # a single core may run two processes for a trial
