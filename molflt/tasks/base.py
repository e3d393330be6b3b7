"""What all tasks share: optimizer, schedule, reproducible randomness, refusal of NaN."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["Schedule", "Task", "lr_factor"]

Schedule = Literal["linear", "inverse_sqrt", "cosine"]


class Task(pl.LightningModule):
    """Base class: a model, how it is optimized, and how it is judged.

    A subclass says what one loss is, and returns sums over items beside it: sums of batches and
    ranks add up, and `summarize` turns them into the metrics of all items together.

    Args:
        model: what is trained.
        lr: peak learning rate.
        warmup_steps: steps of linear growth of the learning rate.
        schedule: what follows: "linear" or "cosine" (to 0 at the last step), or "inverse_sqrt"
            (as 1 / sqrt(step), whatever the last step is).
        optimizer: "adamw" (decoupled weight decay: what fairseq, and so the papers, call Adam), or
            "adam" (coupled: added to the gradient, where it swamps small ones).
        betas: Adam's averaging coefficients.
        eps: Adam's term in the denominator.
        weight_decay: Adam's.
        redraw_every: steps between draws of new random features; null keeps the first ones.
        seed: of dropout, augmentation and redrawn features.

    Attributes:
        unit: what the throughput counts.
        sums_width: length of the sums of validation.
        train_metrics: metrics of training steps that are written down, in order.
        val_metrics: the same of validation.
        best: metric of validation that chooses the best weights.
        best_is_largest: whether more of it is better.

    Raises:
        ValueError: for an option outside its range.
    """

    unit: ClassVar[str]
    sums_width: ClassVar[int]
    train_metrics: ClassVar[tuple[str, ...]]
    val_metrics: ClassVar[tuple[str, ...]]
    best: ClassVar[str]
    best_is_largest: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        warmup_steps: int = 100,
        schedule: Schedule = "linear",
        optimizer: Literal["adamw", "adam"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        redraw_every: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("lr", lr, 0.0),
            ("warmup_steps", warmup_steps, -1),
            ("redraw_every", 1 if redraw_every is None else redraw_every, 0),
        ):
            if not value > low:
                raise ValueError(f"task.{name} must be more than {low}; got {value}")
        self.model = model
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.schedule: Schedule = schedule
        self.optimizer_class = AdamW if optimizer == "adamw" else Adam
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.redraw_every = redraw_every
        self.seed = seed
        self.gradient_norm = float("nan")
        self.last_lr = lr
        self._items = ""
        self._validation: list[Tensor] = []

    # --- what a subclass defines ---------------------------------------------------------------

    def prepare(self, data: Any) -> None:
        """Takes from the training data what the model needs of them, before a new run."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Loss of a training batch, and its sums."""
        raise NotImplementedError

    def sums(self, batch: Any) -> Tensor:
        """Sums of a validation batch: (sums_width,), float64."""
        raise NotImplementedError

    def summarize(self, sums: Tensor) -> dict[str, float]:
        """Metrics of all items whose sums were added up."""
        raise NotImplementedError

    def size(self, batch: Any) -> int:
        """How many of `unit` a batch holds."""
        raise NotImplementedError

    def items(self, batch: Any) -> str:
        """Names what is in a batch, for messages."""
        return f"a batch of {self.size(batch)} {self.unit}"

    # --- steps ---------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Makes the randomness of a step a function of seed, rank and step.

        So a resumed run, whichever step it resumes from, draws the same dropout on every rank.
        """
        words = np.random.SeedSequence([self.seed, self.global_step, self.global_rank])
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        if self.redraw_every and self.global_step and self.global_step % self.redraw_every == 0:
            common = np.random.SeedSequence([self.seed, self.global_step])  # alike on all ranks
            generator = torch.Generator().manual_seed(int(common.generate_state(1)[0]))
            redraw: Any = self.model.redraw_
            redraw(generator)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """One loss.

        Raises:
            ValueError: if the loss is not finite; names step, items and learning rate.
        """
        loss, sums = self.loss(batch)
        self._items = self.items(batch)
        if not bool(torch.isfinite(loss)):
            raise ValueError(self._diverged("loss", loss.item()))
        self.last_lr = self.learning_rate()
        return {"loss": loss, "sums": sums}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the norm of the gradient, and refuses one that is not finite.

        Raises:
            ValueError: if the norm is not finite; one such step would spoil all weights. With
                16-mixed precision the gradient scaler skips such a step instead.
        """
        limit = float("inf") if gradient_clip_val is None else gradient_clip_val
        norm = nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.gradient_norm = float(norm)
        if not np.isfinite(self.gradient_norm) and self.trainer.precision != "16-mixed":
            raise ValueError(self._diverged("gradient norm", self.gradient_norm))

    def on_validation_epoch_start(self) -> None:
        self._validation = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._validation.append(self.sums(batch))

    def validation_metrics(self) -> dict[str, float]:
        """Metrics over the whole split and all ranks, from sums and counts; all ranks call it."""
        zero = torch.zeros(self.sums_width, dtype=torch.float64, device=self.device)
        sums = torch.stack([zero, *self._validation]).sum(dim=0)
        total: Any = self.trainer.strategy.reduce(sums, reduce_op="sum")
        return self.summarize(total)

    # --- optimizer -----------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer_class(
            self.parameters(),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
        scheduler = LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_start(self) -> None:
        """Recomputes the learning rate: a resumed run may have got more steps than its checkpoint.

        Where it has not, this is the number that the checkpoint holds, bit for bit.
        """
        factor = self._lr_factor(self.global_step)
        for config in self.trainer.lr_scheduler_configs:
            for group, base in zip(
                config.scheduler.optimizer.param_groups, config.scheduler.base_lrs, strict=True
            ):
                group["lr"] = base * factor

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def _lr_factor(self, step: int) -> float:
        return lr_factor(step, self.warmup_steps, self.trainer.max_steps, self.schedule)

    def _diverged(self, what: str, value: float) -> str:
        return (
            f"{what} is {value} at step {self.global_step} with learning rate "
            f"{self.learning_rate():.3g} on {self._items}; expected a finite number; the last good "
            "checkpoint is kept; look at these data, or lower task.lr"
        )


def lr_factor(step: int, warmup_steps: int, max_steps: int, schedule: Schedule = "linear") -> float:
    """Learning rate of a step (from 0) in units of its peak: up linearly, then as scheduled."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup_steps) / (step + 1))
    left = max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
