"""Training loop options: the `trainer` group of a configuration."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from molflt.data.batches import BatchedData
from molflt.optional import require
from molflt.training.limits import check_ranges

STEPS = 10_000
"""Default number of steps if neither max_steps nor max_epochs is set."""


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the training loop.

    Args:
        max_steps: total number of optimizer steps; null uses max_epochs, or 10,000 steps if
            max_epochs is also null.
        max_epochs: total number of passes over the training data, as an alternative to max_steps.
            It is converted to steps (rounded up), which the learning rate schedule uses.
        precision: floating-point format of the computation.
        accelerator: type of device; auto uses a CUDA GPU if one is available.
        devices: number of GPUs, or number of processes on the CPU.
        strategy: ddp (distributed training), or auto, which uses ddp for several devices.
        gradient_clip: maximum norm of the gradient; null for no limit.
        val_every: number of steps between validations; a validation always follows the last step.
        checkpoint_every: number of steps between checkpoints; a checkpoint also precedes each
            validation, except the last, which it follows.
        ema_decay: decay of an exponential moving average of the weights. Validation uses the
            averaged weights, and training saves them. null disables averaging. The average starts
            with the weights after the first step; their final coefficient is decay^(max_steps - 1).
        log_every: number of steps between rows of metrics.csv; the last step also has a row.
        num_sanity: number of validation batches to run before training, as a check.
        accumulate: number of batches whose gradients are averaged for one step. All batches have
            the same weight: a step equals a step with one large batch if the loss of each batch is
            an average over equally many labels. Memory is that of one small batch.
        patience: number of validations without improvement after which training stops; null
            disables early stopping.
        logger: csv writes only metrics.csv; tensorboard also writes TensorBoard files to the run
            folder; wandb also sends the rows to Weights & Biases.
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
    logger: Literal["csv", "tensorboard", "wandb"] = "csv"

    def __post_init__(self) -> None:
        check_ranges({f"trainer.{name}": value for name, value in vars(self).items()})

    def steps(self, data: BatchedData[Any]) -> int:
        """Returns the total number of optimizer steps; `data` must be set up."""
        if self.max_epochs is None:
            return STEPS if self.max_steps is None else self.max_steps
        steps = -(-data.batches_in(self.max_epochs) // (self.devices * self.accumulate))
        if self.max_steps not in (None, steps):
            raise ValueError(
                f"trainer.max_epochs={self.max_epochs} equals {steps} steps for these data, but "
                f"trainer.max_steps={self.max_steps}; set one of the two options to null"
            )
        return steps

    def check(self) -> None:
        """Raises an error for options that need packages or devices that are not available."""
        if self.logger != "csv":
            require(self.logger, f"trainer.logger={self.logger}", self.logger)
        kind, available = computes_on(self.accelerator)
        if not available:
            raise ValueError("trainer.accelerator=gpu: torch does not find a GPU; use cpu or auto")
        if self.devices > available:
            raise ValueError(
                f"trainer.devices must be at most {available}, the number of {kind}s on this "
                f"machine; got {self.devices}"
            )
        if self.precision == "16-mixed" and kind == "core":
            raise ValueError("trainer.precision=16-mixed needs a GPU; use bf16-mixed or 32-true")


def computes_on(accelerator: str) -> tuple[str, int]:
    """Returns the kind of device, "GPU" or "core", and the number of such devices.

    Apple GPUs are not counted, because energies are summed in float64, which they do not support.
    """
    import torch

    gpus = torch.cuda.device_count()
    if accelerator == "gpu" or (accelerator == "auto" and gpus):
        return "GPU", gpus
    return "core", max(2, os.cpu_count() or 1)  # two processes may share a core, to test DDP
