"""What happens around the steps: the best weights, checkpoints, signals."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Never, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from torch import Tensor

from molflt.tasks.base import Task
from molflt.training.checkpoint import model_weights
from molflt.training.loop import _LightningTask
from molflt.training.metrics_file import _MetricsFile
from molflt.training.origin import Stopped
from molflt.training.progress import _progress
from molflt.training.run_folder import RunFolder

_Module = _LightningTask[object, object]
_HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


def _callbacks_of(
    task: Task[Never, Never],
    folder: RunFolder,
    log_every: int,
    checkpoint_every: int,
    ema_decay: float | None,
    patience: int | None = None,
) -> list[Callback]:
    """What happens around the steps, in its order.

    Those that need the validated weights come before the averaging callback: at the end of a
    validation epoch they are called in turn, and until then the model holds the averaged weights.

    Args:
        task: whose metrics are written.
        folder: of the run.
        log_every: steps between rows of training metrics, which average over those steps.
        checkpoint_every: steps between checkpoints.
        ema_decay: decay of the moving average of weights; None for none.
        patience: validations without a better one after which training stops; None for all steps.
    """
    metrics = _MetricsFile(task, folder, log_every)
    progress = _progress(task, folder, lambda: metrics.shown, min(log_every, 10))
    callbacks = [metrics, _BestWeights(task, folder, patience), progress]
    if ema_decay is not None:
        callbacks.append(_Averages(ema_decay))
    return [*callbacks, _LastCheckpoint(folder, checkpoint_every)]


class _Averages(WeightAveraging):
    """Moving average of weights. Lightning's own rounds, and so lets frozen weights drift."""

    def __init__(self, decay: float) -> None:
        def average(kept: Tensor, new: Tensor, _: int | Tensor) -> Tensor:
            return torch.where(kept == new, kept, decay * kept + (1 - decay) * new)

        # Buffers are copied, not averaged: the mean of two random projections is none
        super().__init__(use_buffers=False, avg_fn=average)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Weights come to the device after this, and averages would be kept on the CPU
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    @property
    def state_key(self) -> str:
        """As checkpoints of earlier versions have it."""
        return "EMAWeightAveraging"


class _Interrupted(Exception):
    """A signal asked training to stop, and its state has been saved."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(signum, step)
        self.signum = signum
        self.step = step


class _BestWeights(Callback):
    """Keeps the weights of the best validation so far, and stops when no better one comes.

    `Task.ranking` compares validations. The later one of two equal ones is kept. A validation with
    a loss, or another sum, that is not finite is never the best.

    Lightning's `EarlyStopping` reads logged metrics, and these modules log none.
    """

    def __init__(
        self, task: Task[Never, Never], folder: RunFolder, patience: int | None = None
    ) -> None:
        self.folder = folder
        self.patience = patience
        self.task = task
        self._forget()

    def _forget(self) -> None:
        self.best: dict[str, float] = {"step": 0, "since": 0}

    def _scores(self, found: Mapping[str, float], names: Sequence[str]) -> list[float]:
        """The larger, the better; metrics that are absent or not finite are the worst."""
        scores = []
        for name in names:
            value = found.get(name, math.nan)
            sign = 1 if self.task.metrics[name].largest_is_best else -1
            scores.append(sign * value if math.isfinite(value) else -math.inf)
        return scores

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast(_Module, pl_module)
        found, step = module.validation_metrics(), trainer.global_step
        names = self.task.ranking(found)
        new, old = self._scores(found, names), self._scores(self.best, names)
        # An accuracy is a number whatever the outputs are: the loss is one of the sums
        finite = module.validation_is_finite and max(new) > -math.inf
        since = 0 if finite and new > old else int(self.best["since"]) + 1
        if finite and new >= old:
            known = {name: found[name] for name in names if math.isfinite(found[name])}
            self.best = {**known, "step": step}
            metric = next(iter(known))
            header = {"step": step, f"val_{metric}": found[metric]}
            self.folder.save_weights("best", module.model.state_dict(), header)
        self.best["since"] = since
        if self.patience is not None and since >= self.patience and step < trainer.max_steps:
            trainer.should_stop = True
            metric = next((name for name in names if name in self.best), names[0])
            stop = {"step": step, "since": since, "metric": metric}
            stop |= {"best": self.best.get(metric, math.inf), "best_step": int(self.best["step"])}
            self.folder.origin["stopped"] = cast(Stopped, stop)

    def state_dict(self) -> dict[str, float]:
        return dict(self.best)

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Takes over what was best, unless its file has been removed since."""
        self.best |= state_dict  # earlier versions did not count since
        if not self.folder.last.with_name("best.safetensors").is_file():
            self._forget()


class _LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` and then ``last.safetensors``, and stops on signals.

    A checkpoint is taken when a step is complete: after the optimizer, the schedule and the
    averages, and before the validation of that step if it has one, so that a run killed during
    validation validates again. After the last step it is taken when validation is over. There is
    one before any weights are written, if need be before the last step: weights without a
    checkpoint are never those of an interrupted run.

    SIGHUP is what a terminal sends when it is closed; nohup has it ignored, and so it stays.

    Lightning sorts `Checkpoint` callbacks last, behind the averaging of weights, which is needed.

    Args:
        folder: the run's folder.
        every: steps between checkpoints.
    """

    def __init__(self, folder: RunFolder, every: int) -> None:
        self.folder = folder
        self.every = every
        self.signum = 0
        self._validation_due = False
        self._terminals: list[int] = []
        self._weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over; Lightning restores the earlier handlers when it is done.

        Its own SIGTERM handler communicates between ranks from within the handler, and its way
        with SIGINT stops in the middle of a step.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in filter(None, (signal.SIGINT, signal.SIGTERM, _HANGUP)):
                if signal.getsignal(signum) != signal.SIG_IGN:
                    signal.signal(signum, self._note)
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        self.folder.check_machine(
            {
                "threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "device": trainer.strategy.root_device.type,
            }
        )
        self._save_early(trainer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        for number in self._terminals:
            if not os.isatty(number):  # closed: what is printed there would be an error now
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if self.signum and signum != _HANGUP:  # of which a closed terminal may send several
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self.signum = self.signum or signum

    def _agreed_signal(self, trainer: pl.Trainer) -> int:
        """The signal that any rank has received, or 0; all ranks call it at the same places."""
        if trainer.world_size == 1:
            return self.signum
        # `signum` itself stays: a signal may arrive while the ranks are talking
        flag = torch.tensor(float(self.signum), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(flag, reduce_op="max"))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if not cast(_Module, pl_module).step_completed():
            return  # a checkpoint could not hold the gradients so far
        if step >= trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates, whatever the interval
        elif not cast(_Module, pl_module).validation_follows():
            signum = self._agreed_signal(trainer)
            if signum or step % self.every == 0:
                self._save(trainer)
            if signum:
                raise _Interrupted(signum, step)
            self._save_early(trainer)

    def _save_early(self, trainer: pl.Trainer) -> None:
        """Before the last step, if there is no checkpoint yet."""
        if trainer.global_step == trainer.max_steps - 1 and not self.folder.last.exists():
            self._save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step < trainer.max_steps:
            self._save(trainer, validation_due=True)
            if signum := self._agreed_signal(trainer):
                raise _Interrupted(signum, trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        # several ranks may have different numbers of batches: they agree at the end
        if self.signum and trainer.world_size == 1 and trainer.global_step < trainer.max_steps:
            raise _Interrupted(self.signum, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.should_stop:  # after the last step, or for want of patience
            self._save(trainer)
        elif signum := self._agreed_signal(trainer):
            raise _Interrupted(signum, trainer.global_step)

    def _save(self, trainer: pl.Trainer, validation_due: bool = False) -> None:
        self._validation_due = validation_due
        trainer.save_checkpoint(self.folder.last)
        # with averaging on, "state_dict" is the averaged model
        stop = self.folder.origin.get("stopped")
        header = {"step": trainer.global_step} | ({"stopped": json.dumps(stop)} if stop else {})
        self.folder.save_weights("last", self._weights, header)
        self._weights = {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning's way of saying that a validation was begun and has to be run
        if self._validation_due:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        self._weights = model_weights(checkpoint)
