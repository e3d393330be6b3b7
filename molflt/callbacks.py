"""What happens around the steps: metrics file, checkpoints, signals, progress bar."""

from __future__ import annotations

import csv
import io
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, TQDMProgressBar
from torch import Tensor

from molflt.checkpoint import save_weights
from molflt.files import write_atomically
from molflt.tasks.base import Task

__all__ = [
    "Interrupted",
    "LastCheckpoint",
    "MetricsFile",
    "StepBar",
    "columns_of",
]


def columns_of(task: Task) -> list[str]:
    """Columns of ``metrics.csv``: what a step is, what training measured, what validation did."""
    return [
        *("step", "lr", "train_loss"),
        *(f"train_{name}" for name in task.train_metrics),
        *("gradient_norm", f"{task.unit}_per_s"),
        *(f"val_{name}" for name in task.val_metrics),
    ]


class Interrupted(Exception):
    """A signal asked training to stop, and its state has been saved."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} at step {step}")
        self.signum = signum
        self.step = step


class MetricsFile(Callback):
    """Writes ``metrics.csv`` and the best weights.

    It stands before the averaging callback: at the end of a validation epoch callbacks are called
    in turn, and there the model still holds the averaged weights that were validated.

    Args:
        task: whose metrics are written.
        folder: the run's folder.
        log_every: steps between rows of training metrics, which average over those steps.
    """

    def __init__(self, task: Task, folder: Path, log_every: int) -> None:
        self.columns = columns_of(task)
        self.path = folder / "metrics.csv"
        self.best_path = folder / "checkpoints" / "best.safetensors"
        self.log_every = log_every
        worst = float("-inf" if task.best_is_largest else "inf")
        self.best = {task.best: worst, "step": 0}
        self.shown: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._since = time.perf_counter()
        self._steps = 0
        self._totals: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._rewind(trainer)
        self._forget()

    def _rewind(self, trainer: pl.Trainer) -> None:
        """Drops rows that were written after the checkpoint; those steps come again."""
        rows = []
        if self.path.exists() and trainer.global_step > 0:
            with open(self.path, newline="") as file:
                rows = [row for row in csv.DictReader(file) if self._stays(row, trainer)]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, buffer.getvalue().encode())

    @staticmethod
    def _stays(row: dict[str, str], trainer: pl.Trainer) -> bool:
        step = int(row["step"] or 0)
        if not row["lr"] and step == trainer.global_step:
            return not _validates(trainer)
        return step <= trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        loss = outputs["loss"].detach().double().reshape(1)
        counts = loss.new_tensor([cast(Task, pl_module).size(batch), 1.0])
        row = torch.cat([loss, counts, outputs["sums"].double()])
        self._totals = row if self._totals is None else self._totals + row
        self._steps += 1
        if trainer.global_step % self.log_every == 0 or trainer.global_step >= trainer.max_steps:
            self._log_training(trainer, pl_module)

    def _log_training(self, trainer: pl.Trainer, task: Any) -> None:
        total: Any = trainer.strategy.reduce(self._totals, reduce_op="sum")
        loss, size, batches = total[:3].tolist()
        metrics = task.summarize(total[3:])
        speed = size / (time.perf_counter() - self._since)
        # the scheduler has stepped already; this row describes the steps before it
        row = {
            "step": trainer.global_step,
            "lr": task.last_lr,
            "train_loss": loss / batches,
            **{f"train_{name}": metrics[name] for name in task.train_metrics},
            "gradient_norm": task.gradient_norm,
            f"{task.unit}_per_s": speed,
        }
        self._append(trainer, row)
        self.shown = {
            **self.shown,
            "loss": f"{row['train_loss']:.3g}",
            **{_short(name): _rounded(metrics[name]) for name in task.train_metrics[:2]},
            "lr": f"{row['lr']:.2g}",
            f"{task.unit}/s": f"{speed:.0f}",
        }
        self._forget()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        task = cast(Task, pl_module)
        metrics = task.validation_metrics()
        row = {f"val_{name}": metrics[name] for name in task.val_metrics}
        self._append(trainer, {"step": trainer.global_step, **row})
        for name in task.val_metrics[:2]:
            self.shown[f"val_{_short(name)}"] = _rounded(metrics[name])
        new, best = metrics[task.best], self.best[task.best]
        if new > best if task.best_is_largest else new < best:
            self.best = {task.best: new, "step": trainer.global_step}
            if trainer.is_global_zero:
                header = {"step": trainer.global_step, f"val_{task.best}": new}
                save_weights(self.best_path, task.model.state_dict(), header)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.perf_counter() - self._paused  # atoms/s counts training only

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    def _append(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            with open(self.path, "a", newline="") as file:
                csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.best)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict)


def _short(metric: str) -> str:
    return metric.replace("percent", "%")


def _rounded(value: float) -> str:
    return f"{value:.4g}"


def _validates(trainer: pl.Trainer) -> bool:
    """Whether the step just taken is followed by a validation."""
    step = trainer.global_step
    return step > 0 and (step >= trainer.max_steps or step % int(trainer.val_check_interval) == 0)


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` and ``last.safetensors``, and stops on SIGINT and SIGTERM.

    A checkpoint is taken when a step is complete: after the optimizer, the schedule and the
    averages, and before the validation of that step if it has one, so that a run killed during
    validation validates again. After the last step it is taken when validation is over.

    Lightning sorts `Checkpoint` callbacks last, behind the averaging of weights, which is needed.

    Args:
        folder: the run's folder.
        every: steps between checkpoints.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder / "checkpoints"
        self.every = every
        self.signum = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the two signals over; Lightning restores the earlier handlers when it is done.

        Its own SIGTERM handler communicates between ranks from within the handler, and its way
        with SIGINT stops in the middle of a step.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self.signum = signum

    def _agreed_signal(self, trainer: pl.Trainer) -> int:
        """The signal that any rank has received, or 0; all ranks call it at the same places."""
        if trainer.world_size == 1:
            return self.signum
        # `signum` itself stays: a signal may arrive while the ranks are talking
        flag = torch.tensor(float(self.signum), device=trainer.strategy.root_device)
        agreed: Any = trainer.strategy.reduce(flag, reduce_op="max")
        return int(agreed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        step = trainer.global_step
        if step >= trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates, whatever the interval
        elif not _validates(trainer):
            signum = self._agreed_signal(trainer)
            if signum or step % self.every == 0:
                self._save(trainer)
            if signum:
                raise Interrupted(signum, step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step < trainer.max_steps:
            self._save(trainer, validation_due=True)
            if signum := self._agreed_signal(trainer):
                raise Interrupted(signum, trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # several ranks may have different numbers of batches: they agree at the end
        if self.signum and trainer.world_size == 1 and trainer.global_step < trainer.max_steps:
            raise Interrupted(self.signum, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.global_step >= trainer.max_steps:
            self._save(trainer)
        elif signum := self._agreed_signal(trainer):
            raise Interrupted(signum, trainer.global_step)

    def _save(self, trainer: pl.Trainer, validation_due: bool = False) -> None:
        self._validation_due = validation_due
        trainer.save_checkpoint(self.folder / "last.ckpt")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning's way of saying that a validation was begun and has to be run
        if self._validation_due:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        # with averaging on, "state_dict" is the averaged model
        weights = {
            name.removeprefix("model."): tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name.startswith("model.")
        }
        if trainer.is_global_zero:
            save_weights(self.folder / "last.safetensors", weights, {"step": trainer.global_step})


class StepBar(TQDMProgressBar):
    """Lightning's progress bar, counting steps of the whole training, with our figures.

    Args:
        shown: returns what stands behind the bar.
        refresh_rate: steps between updates.
    """

    def __init__(self, shown: Callable[[], dict[str, str]], refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._shown = shown

    @property
    def train_description(self) -> str:
        return "training"

    def init_sanity_tqdm(self) -> Any:
        return self._on_terminal(super().init_sanity_tqdm)

    def init_validation_tqdm(self) -> Any:
        return self._on_terminal(super().init_validation_tqdm)

    def _on_terminal(self, make: Callable[[], Any]) -> Any:
        """A bar that a log file does without: there each one would leave its lines behind."""
        enabled = self._enabled
        self._enabled = enabled and sys.stdout.isatty()
        bar = make()
        self._enabled = enabled
        return bar

    def get_metrics(self, *_: Any) -> dict[str, Any]:
        return dict(self._shown())

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        bar = self.train_progress_bar
        bar.total = trainer.max_steps
        bar.initial = bar.n = trainer.global_step
        bar.refresh()

    def on_train_epoch_start(self, *_: Any) -> None:
        """There is one endless epoch; Lightning would reset the bar to it."""

    def on_exception(self, *_: Any) -> None:
        for bar in (self._train_progress_bar, self._val_progress_bar):
            if bar is not None:
                bar.close()
