"""File metrics.csv of a run, with rows for training steps and validations."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any, Never, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from molflt.files import write_atomically
from molflt.tasks.base import Task
from molflt.training.checkpoint import Checkpoint
from molflt.training.loop import _LightningTask
from molflt.training.run_folder import RunFolder

_Module = _LightningTask[object, object]


class _MetricsFile(Callback):
    """Writes ``metrics.csv``, and restores it to the state of the checkpoint when resuming."""

    def __init__(self, task: Task[Never, Never], folder: RunFolder, log_every: int) -> None:
        self.folder = folder
        self.names = {
            use: [name for name, metric in task.metrics.items() if use in metric.measured_in]
            for use in ("train", "val")
        }
        self.speed = f"{task.unit}_per_s"
        self.columns = [
            *("step", "lr", "train_loss"),
            *(f"train_{name}" for name in self.names["train"]),
            *("gradient_norm", self.speed),
            *(f"val_{name}" for name in self.names["val"]),
        ]
        self.path = folder.path / "metrics.csv"
        self.log_every = log_every
        self.shown: dict[str, str] = {}
        self._kept: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._since = self._paused = time.perf_counter()
        self._totals: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()
        if self._kept:  # the sum over ranks, restored on the first rank
            width = 3 + len(cast(_Module, pl_module).task.sums.__annotations__)
            kept = [*self._kept["totals"], *[0.0] * width][:width]  # earlier versions have fewer
            totals = torch.tensor(kept, dtype=torch.float64)
            totals = totals if trainer.is_global_zero else torch.zeros_like(totals)
            self._totals = totals.to(pl_module.device)
            self._since -= self._kept["seconds"]
        if trainer.is_global_zero:
            self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        """Restores metrics.csv and TensorBoard's log to the state of the checkpoint."""
        again = self._rewind(trainer.global_step, _validation_due(self.folder.checkpoint))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):  # it has dropped this step
                for row in again:
                    numbers = {name: float(cell) for name, cell in row.items() if cell}
                    logger.log_metrics(numbers, step=int(numbers.pop("step")))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves the sums since the last row, which belong to the next row."""
        if self._totals is not None:
            totals = trainer.strategy.reduce(self._totals.clone(), reduce_op="sum")
            seconds = time.perf_counter() - self._since
            kept = {"totals": totals.tolist(), "seconds": seconds}
            checkpoint["callbacks"][self.state_key] = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the sums; earlier versions did not save any."""
        self._kept = state_dict

    def _rewind(self, step: int, validates: bool) -> list[dict[str, str]]:
        """Drops rows after the checkpoint, whose steps are repeated; returns rows of its step."""
        rows = [
            (at, row)
            for at, row in (self._read() if step > 0 else ())
            # a training row whose sums are in the checkpoint was written by early stopping
            if at < step or (at == step and not (self._kept if row["lr"] else validates))
        ]
        text = self._lines([row for _, row in rows], header=True)
        write_atomically(self.path, text.encode())
        return [row for at, row in rows if at == step]

    def _read(self) -> list[tuple[int, dict[str, str]]]:
        """Reads steps and rows, and ignores an incomplete last row."""
        try:
            text = self.path.read_bytes().decode()
            whole = text[: text.rfind("\n") + 1]
            table = csv.DictReader(io.StringIO(whole), strict=True)
            if whole and table.fieldnames != self.columns:
                raise ValueError(f"expected the columns {','.join(self.columns)}")
            return [(int(row["step"]), row) for row in table]
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{self.path}: {error}; restore the table, or move it away to start a new one"
            ) from None

    def _lines(self, rows: Sequence[Mapping[str, object]], header: bool = False) -> str:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return buffer.getvalue()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Mapping[str, Tensor],  # type: ignore[override]  # what training_step returns
        batch: object,
        batch_idx: int,
    ) -> None:
        self._totals = outputs["sums"] + (0.0 if self._totals is None else self._totals)
        if not cast(_Module, pl_module).step_completed():
            return
        if trainer.global_step % self.log_every == 0 or trainer.global_step >= trainer.max_steps:
            self._log_training(trainer, cast(_Module, pl_module), self._totals)
            self._forget()

    def _log_training(self, trainer: pl.Trainer, module: _Module, totals: Tensor) -> None:
        totals = trainer.strategy.reduce(totals.clone(), reduce_op="sum")
        loss, batches, size = totals[:3].tolist()
        metrics = module.task.summarize(totals[3:])
        loss /= batches
        speed = size / (time.perf_counter() - self._since)
        known = [name for name in self.names["train"] if name in metrics]
        # the scheduler has already advanced; this row describes the steps before that
        row = {
            "step": trainer.global_step,
            "lr": module.last_lr,
            "train_loss": loss,
            **{f"train_{name}": metrics[name] for name in known},
            "gradient_norm": module.gradient_norm,
            self.speed: speed,
        }
        self._write(trainer, row)
        self.shown |= {
            "loss": f"{loss:.3g}",
            **{_short(name): f"{metrics[name]:.4g}" for name in known[:2]},
            "lr": f"{module.last_lr:.2g}",
            self.speed.replace("_per_", "/"): f"{speed:.0f}",
        }

    def _write(self, trainer: pl.Trainer, row: Mapping[str, float]) -> None:
        self.folder.append_metrics(self._lines([row]))
        for logger in trainer.loggers:
            rest = {name: value for name, value in row.items() if name != "step"}
            logger.log_metrics(rest, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = cast(_Module, pl_module).validation_metrics()
        row = {f"val_{name}": metrics[name] for name in self.names["val"] if name in metrics}
        self._write(trainer, {"step": trainer.global_step, **row})
        for name in [name for name in self.names["val"] if name in metrics][:2]:
            self.shown[f"val_{_short(name)}"] = f"{metrics[name]:.4g}"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.perf_counter() - self._paused  # atoms/s counts training only
        if trainer.should_stop and self._totals is not None:  # early stopping
            # the sums are kept, because training may resume with more patience
            self._log_training(trainer, cast(_Module, pl_module), self._totals)


def _validation_due(checkpoint: Checkpoint | None) -> bool:
    """Returns True if the checkpoint was saved before its validation finished."""
    if checkpoint is None:
        return False
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]
    return bool(progress["processed"] < progress["ready"])


def _short(metric: str) -> str:
    return metric.replace("percent", "%")
