"""The Lightning module of a task, its checkpoints, and the callback that writes metrics.csv."""

import csv
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from molflt.data.batches import BatchedData
from molflt.files import csv_rows, csv_text, write_atomically
from molflt.tasks.base import Task
from molflt.training.run_folder import RunFolder

_COUNTED = ("loss", "batches", "size")  # sums over batches before those of the task


class _LightningTask(pl.LightningModule):
    """Training and validation steps of a task; the loaders start at the trainer's current step."""

    def __init__(self, task: Task[Any, Any], data: BatchedData[Any]) -> None:
        super().__init__()
        self.task = task
        self.data = data
        self.model: Any = task.model
        self.gradient_norm = float("nan")  # in the last step, before clipping
        self.last_lr = task.lr  # learning rate of the last step
        self._batch_name, self._batch_size = "no batch yet", 0  # of the last batch
        self._step_before = 0  # number of steps before the last batch
        self._sums: list[Tensor] = []
        self._metrics: dict[str, float] | None = None
        self.validation_is_finite = True  # True if all sums of the last validation are finite

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "data": None}  # copies for averages do not need data

    def train_dataloader(self) -> DataLoader[object]:
        self.data.start_step = self.global_step * self.trainer.accumulate_grad_batches  # per rank
        return self.data.train_dataloader(self.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader[object]:
        return self.data.val_dataloader(self.global_rank, self.trainer.world_size)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Seeds torch by the seed, rank, step and batch, as in an uninterrupted training run."""
        self._step_before = step = self.global_step
        entropy = [self.task.seed, step, self.global_rank]
        accumulated = batch_idx % self.trainer.accumulate_grad_batches
        if accumulated:  # the first batch of a step has the same seed with and without accumulation
            entropy.append(accumulated)
        state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> np.uint64(1)))  # below 2^63, which torch accepts
        every = self.task.redraw_every
        if every is not None and step > 0 and step % every == 0 and not accumulated:
            common = np.random.SeedSequence([self.task.seed, step])  # the same on all ranks
            seed = int(common.generate_state(1)[0])
            self.model.redraw_(torch.Generator().manual_seed(seed))

    def training_step(self, batch: object, batch_idx: int) -> dict[str, Tensor]:
        """Returns the loss, and "sums": the `_COUNTED` values of this batch and the task's sums."""
        progress = self.global_step / max(1, self.trainer.max_steps)
        self._batch_name, self._batch_size = self.task.name(batch), self.task.size(batch)
        loss, sums = self.task.loss(batch, progress)
        self._share_seen()
        self.last_lr = float(self.trainer.optimizers[0].param_groups[0]["lr"])
        if not bool(torch.isfinite(loss)):
            raise ValueError(self._diverged("loss", loss.item()))
        counted = loss.detach(), torch.tensor(1), torch.tensor(self._batch_size)
        return {"loss": loss, "sums": _stacked([*counted, *sums], self.device)}

    def _share_seen(self) -> None:
        """Merges records of the training data, such as its elements, over all ranks."""
        if self.trainer.world_size > 1:
            for name in getattr(self.model, "seen_by", ()):
                seen = self.model.get_buffer(name)
                seen |= self.trainer.strategy.reduce(seen.int(), reduce_op="sum").bool()

    def configure_gradient_clipping(self, *_: object, **__: object) -> None:
        limit = self.trainer.gradient_clip_val
        norm = nn.utils.clip_grad_norm_(self.parameters(), math.inf if limit is None else limit)
        self.gradient_norm = float(norm)
        if not np.isfinite(self.gradient_norm) and self.trainer.precision != "16-mixed":
            raise ValueError(self._diverged("gradient norm", self.gradient_norm))

    def step_completed(self) -> bool:
        """Returns True if the last batch completed a step; gradients may be accumulated."""
        return self.global_step > self._step_before

    def on_validation_epoch_start(self) -> None:
        self._sums, self._metrics = [], None

    def validation_step(self, batch: object, batch_idx: int) -> None:
        self._batch_name, self._batch_size = self.task.name(batch), self.task.size(batch)
        self._sums.append(_stacked([*self.task.validation_sums(batch)], self.device))

    def validation_metrics(self) -> dict[str, float]:
        """Returns the metrics of the whole validation split; must be called by all ranks."""
        if self._metrics is None:
            sums = torch.stack(self._sums).sum(dim=0)
            totals = self.trainer.strategy.reduce(sums, reduce_op="sum")
            self._metrics = self.task.summarize(totals)
            self.validation_is_finite = bool(totals.isfinite().all())
        return self._metrics

    def configure_optimizers(self) -> Any:
        optimizer = self.task.optimizer()
        schedule = {"scheduler": LambdaLR(optimizer, self._lr_factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_start(self) -> None:
        """Recomputes the learning rate: bitwise the same unless a resumed run has more steps."""
        scheduler: Any = self.lr_schedulers()
        factor = self._lr_factor(self.global_step)
        for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = base * factor

    def _lr_factor(self, step: int) -> float:
        return self.task.lr_factor(step, self.trainer.max_steps)

    def step_description(self) -> str:
        """Describes the current step and its batch, for messages about memory."""
        size = f"{self._batch_size:,} {self.task.unit}"
        return f"step {self.global_step} with {size}, {self._batch_name},"

    def _diverged(self, what: str, value: float) -> str:
        batches = self._batch_name
        if self.trainer.accumulate_grad_batches > 1:
            batches += " or the other batches of this step"
        return (
            f"{what} is {value} at step {self.global_step} with learning rate {self.last_lr:.3g} "
            f"on {batches}; expected a finite number; earlier checkpoints are kept; "
            "check these data, or lower task.lr"
        )


def _stacked(scalars: list[Tensor], device: torch.device) -> Tensor:
    """Stacks scalars to a float64 tensor (scalars,)."""
    return torch.stack([scalar.to(device, torch.float64) for scalar in scalars])


class _CheckpointIO(TorchCheckpointIO):
    """Provides Lightning with access to checkpoints through the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None
    ) -> None:
        self.folder.save_checkpoint(checkpoint)

    def load_checkpoint(self, *_: object, **__: object) -> dict[str, Any]:
        assert self.folder.checkpoint is not None  # has been read
        return self.folder.checkpoint


class _MetricsFile(Callback):
    """Writes ``metrics.csv`` and restores it to the state of the checkpoint when resuming."""

    def __init__(self, task: Task[Any, Any], folder: RunFolder, log_every: int) -> None:
        self.folder = folder
        metrics = task.metrics.items()
        self.train = [name for name, metric in metrics if "train" in metric.measured_in]
        self.val = [name for name, metric in metrics if "val" in metric.measured_in]
        self.speed = f"{task.unit}_per_s"
        self.columns = ["step", "lr", "train_loss", *(f"train_{name}" for name in self.train)]
        self.columns += ["gradient_norm", self.speed, *(f"val_{name}" for name in self.val)]
        self.path = folder.path / "metrics.csv"
        self.log_every = log_every
        self.latest: dict[str, str] = {}  # values for the progress bar
        self._start_row()

    def _start_row(self) -> None:
        self._since = self._paused = time.perf_counter()
        self._totals: Tensor | None = None  # "sums" of `training_step` since the last row

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._start_row()
        callbacks = {} if self.folder.checkpoint is None else self.folder.checkpoint["callbacks"]
        # the sums since the last row, which version 0.1 did not save
        if restored := callbacks.get(self.state_key):
            totals = torch.tensor(restored["totals"], dtype=torch.float64)
            if not trainer.is_global_zero:  # the checkpoint contains the sum over ranks
                totals.zero_()
            self._totals = totals.to(pl_module.device)
            self._since -= restored["seconds"]
            pl_module.last_lr, pl_module.gradient_norm = restored["last"]
        if trainer.is_global_zero:
            rows = self._rewind(trainer.global_step, restored is not None)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):  # it has removed the rows of the step
                    for row in rows:
                        numbers = {name: float(cell) for name, cell in row.items() if cell}
                        logger.log_metrics(numbers, step=int(numbers.pop("step")))
        if pl_module.task.validates_start and self.folder.checkpoint is None:
            self.on_validation_epoch_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves the sums accumulated since the last row, which count toward the next row."""
        if self._totals is not None:
            totals = trainer.strategy.reduce(self._totals.clone(), reduce_op="sum")
            seconds = time.perf_counter() - self._since
            last = pl_module.last_lr, pl_module.gradient_norm
            state = {"totals": totals.tolist(), "seconds": seconds, "last": last}
            checkpoint["callbacks"][self.state_key] = state

    def _rewind(self, step: int, restored: bool) -> list[dict[str, str]]:
        """Removes rows that will be written again; returns the other rows of the last step.

        `restored` is True if the checkpoint contains sums for the next row.
        """
        validates = False  # again, if the checkpoint was saved before the end of a validation
        rows: list[tuple[int, dict[str, str]]] = []
        if self.folder.checkpoint is not None:
            loops = self.folder.checkpoint["loops"]["fit_loop"]
            progress = loops["epoch_loop.val_loop.batch_progress"]["total"]
            validates = progress["processed"] < progress["ready"]
            rows = self._read()
        earlier = [row for number, row in rows if number < step]
        # Only training rows have a learning rate. Early stopping writes one of sums it saves.
        last = [row for number, row in rows if number == step]
        last = [row for row in last if not (restored if row["lr"] else validates)]
        write_atomically(self.path, csv_text(earlier + last, self.columns).encode())
        return last

    def _read(self) -> list[tuple[int, dict[str, str]]]:
        """Reads the rows of metrics.csv, each with its step; ignores an incomplete last row."""
        try:
            text = self.path.read_bytes().decode()
            table = csv_rows(text[: text.rfind("\n") + 1])
            if table and [*table[0]] != self.columns:
                raise ValueError(f"expected the columns {','.join(self.columns)}")
            return [(int(row["step"]), row) for row in table]
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{self.path}: {error}; restore the table, or move it away to start a new one"
            ) from None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: object
    ) -> None:
        sums = outputs["sums"]
        self._totals = sums if self._totals is None else self._totals + sums
        if not pl_module.step_completed():
            return
        if trainer.global_step % self.log_every == 0 or trainer.global_step >= trainer.max_steps:
            self._log_training(trainer, pl_module, self._totals)
            self._start_row()

    def _log_training(self, trainer: pl.Trainer, module: _LightningTask, totals: Tensor) -> None:
        totals = trainer.strategy.reduce(totals.clone(), reduce_op="sum")
        loss_sum, batches, size = totals[: len(_COUNTED)].tolist()
        metrics = module.task.summarize(totals[len(_COUNTED) :])
        loss = loss_sum / batches
        speed = size / (time.perf_counter() - self._since)
        known = [name for name in self.train if name in metrics]
        # the scheduler has already advanced; this row describes the previous steps
        row = {
            "step": trainer.global_step,
            "lr": module.last_lr,
            "train_loss": loss,
            **{f"train_{name}": metrics[name] for name in known},
            "gradient_norm": module.gradient_norm,
            self.speed: speed,
        }
        self._write(trainer, row)
        self.latest |= {
            "loss": f"{loss:.3g}",
            **{name.replace("percent", "%"): f"{metrics[name]:.4g}" for name in known[:2]},
            "lr": f"{module.last_lr:.2g}",
            self.speed.replace("_per_", "/"): f"{speed:.0f}",
        }

    def _write(self, trainer: pl.Trainer, row: Mapping[str, float]) -> None:
        self.folder.append_metrics(csv_text([row], self.columns, header=False))
        numbers = {name: value for name, value in row.items() if name != "step"}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        metrics = pl_module.validation_metrics()
        known = [name for name in self.val if name in metrics]
        row = {f"val_{name}": metrics[name] for name in known}
        self._write(trainer, {"step": trainer.global_step, **row})
        for name in known[:2]:
            self.latest[f"val_{name}".replace("percent", "%")] = f"{metrics[name]:.4g}"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._since += time.perf_counter() - self._paused  # atoms/s excludes validation
        if trainer.should_stop and self._totals is not None:  # early stopping
            # the sums are kept, because training may resume with more patience
            self._log_training(trainer, pl_module, self._totals)
