"""Training progress: a bar on terminals, one line per validation elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Never, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from molflt.tasks.base import Task
from molflt.training.loop import _LightningTask
from molflt.training.outcome import duration
from molflt.training.run_folder import RunFolder

_Shown = Callable[[], dict[str, str]]
_SECONDS = 0.1  # between updates of the bar during validation


class _Lines(Callback):
    """Prints one line per validation, for logs."""

    def __init__(self, task: Task[Never, Never], folder: RunFolder, shown: _Shown) -> None:
        self.metrics = {n: m for n, m in task.metrics.items() if "val" in m.measured_in}
        self.folder = folder
        self.shown = shown
        self._since = time.perf_counter()

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


class _StepBar(Callback):
    """Progress bar over all training steps, with the metrics of the task."""

    def __init__(self, shown: _Shown, refresh_rate: int) -> None:
        self._shown = shown
        self._refresh_rate = refresh_rate
        self._next = 0.0  # earliest time of the next update during validation
        self._bar = tqdm(disable=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._bar = tqdm(
            desc="training",
            total=trainer.max_steps,
            initial=trainer.global_step,
            file=sys.stdout,
            dynamic_ncols=True,
            smoothing=0,
            disable=not trainer.is_global_zero,
        )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step % self._refresh_rate == 0 or step >= trainer.max_steps:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(self._shown())

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking and time.monotonic() > self._next:
            self._next = time.monotonic() + _SECONDS
            (total,) = trainer.num_val_batches
            self._bar.set_description(f"validating {batch_idx + 1}/{total}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._bar.set_description("training", refresh=False)
            self._bar.set_postfix(self._shown())

    def on_train_end(self, *_: object) -> None:
        self._bar.close()

    def on_exception(self, *_: object) -> None:
        self._bar.close()
