"""Progress of a training: a bar on terminals, a line per validation elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Never, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from molflt.tasks.base import Task
from molflt.training.loop import _LightningTask
from molflt.training.outcome import duration
from molflt.training.run_folder import RunFolder

_Shown = Callable[[], dict[str, str]]
_SECONDS = 0.1  # between updates of the bar in a validation


def _progress(
    task: Task[Never, Never], folder: RunFolder, shown: _Shown, refresh_rate: int
) -> ProgressBar:
    """Returns a progress bar for terminals, or lines for other outputs.

    Args:
        task: task with the metrics to show.
        folder: run folder, which prints in the first process only.
        shown: returns the last values in metrics.csv by name.
        refresh_rate: steps between updates of the bar.
    """
    if sys.stdout.isatty():
        return _StepBar(shown, refresh_rate)
    return _Lines(task, folder, shown)


class _Lines(ProgressBar):
    """One line per validation, for logs.

    A progress bar to Lightning, which would otherwise add its own.
    """

    def __init__(self, task: Task[Never, Never], folder: RunFolder, shown: _Shown) -> None:
        super().__init__()
        self.metrics = {n: m for n, m in task.metrics.items() if "val" in m.measured_in}
        self.folder = folder
        self.shown = shown
        self._since = time.perf_counter()

    def disable(self) -> None:
        """Called by Lightning in all processes but the first, where nothing is printed anyway."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        found = cast(_LightningTask[object, object], pl_module).validation_metrics()
        measured = [name for name in self.metrics if math.isfinite(found.get(name, math.nan))]
        # the ranking metric may repeat another one under its own name
        values = list(dict.fromkeys(self.metrics[name].shown(found[name]) for name in measured))
        known = self.shown().items()
        rest = [f"{name} {text}" for name, text in known if name == "loss" or name[-2:] == "/s"]
        rest.append(duration(time.perf_counter() - self._since))
        self.folder.say(
            f"step {trainer.global_step:,} of {trainer.max_steps:,}: validation "
            f"{', '.join(values[:2])}; {', '.join(rest)}"
        )


class _StepBar(TQDMProgressBar):
    """Lightning's progress bar over all steps of the training, with the metrics of the task.

    Args:
        shown: returns the text after the bar, by name.
        refresh_rate: steps between updates.
    """

    def __init__(self, shown: _Shown, refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._shown = shown
        self._seen = 0  # batches of this validation
        self._next = 0.0  # earliest time of the next update

    @property
    def train_description(self) -> str:
        return "training"

    @property
    def sanity_check_description(self) -> str:
        return "trying validation"

    def init_validation_tqdm(self) -> Tqdm:
        """Returns a disabled bar: a second bar would have to move the cursor."""
        return Tqdm(disable=True)

    def get_metrics(self, *_: object) -> dict[str, int | str | float | dict[str, float]]:
        return dict(self._shown())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        bar = self.train_progress_bar
        bar.total = trainer.max_steps
        bar.initial = bar.n = trainer.global_step
        bar.refresh()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if cast(_LightningTask[object, object], pl_module).step_completed():
            place = trainer.global_step - 1  # a step may have several batches
            super().on_train_batch_end(trainer, pl_module, outputs, batch, place)  # type: ignore[arg-type]

    def on_train_epoch_start(self, *_: object) -> None:
        """Does nothing: the only epoch is endless, and Lightning would reset the bar."""

    def on_validation_batch_start(self, *_: object, **__: object) -> None:
        """Counts the batches of the one validation set."""
        if self.has_dataloader_changed(0):
            self.val_progress_bar.total = self.total_val_batches_current_dataloader
            self._seen = 0

    def on_validation_batch_end(self, *_: object, **__: object) -> None:
        """Updates for every batch: they may be few and slow."""
        self._seen += 1
        self.val_progress_bar.update()
        if not self.trainer.sanity_checking and time.monotonic() > self._next:
            self._next = time.monotonic() + _SECONDS
            total = self.total_val_batches_current_dataloader
            self.train_progress_bar.set_description(f"validating {self._seen}/{total}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.train_progress_bar.set_description(self.train_description, refresh=False)
        super().on_validation_end(trainer, pl_module)

    def on_exception(self, *_: object) -> None:
        for bar in (self._train_progress_bar, self._val_progress_bar):
            if bar is not None:
                bar.close()
